"""`python -m kvferry.ops.bench.interference`: its figures out of known times, for people and as a picture."""

import sys
from pathlib import Path

import pytest

from kvferry.common.base.errors import (
    ConfigError,
    KvferryError,
)
from kvferry.ops.bench.interference import Side, main, plot, table
from kvferry.ops.bench.serve.load import RequestLoad
from kvferry.ops.bench.serve.report import Frame, ServeReport, make_report
from kvferry.ops.bench.serve.request import RequestOutcome

FRAME = Frame("http://x", "m", "infer", 1, cpu_s=0.5)
LOAD = RequestLoad(2, 4, 3, 2, None, 1, 50)


def answers(gap_s: float, *, failed: int = 0) -> ServeReport:
    """Three tokens each, this far apart, after half a second."""
    arrivals = [(0.5, 1), (0.5 + gap_s, 1), (0.5 + 2 * gap_s, 1)]
    whole = [RequestOutcome(due=0.0, ended=2.0, arrivals=list(arrivals), tokens=3) for _ in range(2)]
    return make_report(
        FRAME, LOAD, [*whole, *(RequestOutcome(due=0.0, ended=1.0, error="timeout") for _ in range(failed))]
    )


def sides() -> list[Side]:
    return [
        Side("split", ("--prefill", "1"), answers(0.01), answers(0.02), answers(0.1)),
        Side("colocated", ("--colocated", "2"), answers(0.01), answers(0.5, failed=1), answers(0.1)),
    ]


def test_a_line_for_each_layout():
    head, split, colocated = table(sides())
    assert head.split()[:3] == ["ms", "alone", "p50"]
    assert split.split() == ["split", "10.0", "10.0", "20.0", "20.0", "20.0", "500.0", "500.0", "2"]
    assert colocated.split()[-3:] == ["2,", "1", "failed"]


def test_answers_of_one_token_measure_nothing():
    single = make_report(FRAME, LOAD, [RequestOutcome(due=0.0, ended=1.0, arrivals=[(0.5, 1)], tokens=1)])
    with pytest.raises(KvferryError, match="too short"):
        list(table([Side("split", (), single, single, single)]))


def test_a_picture(tmp_path: Path):
    plot(sides(), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="needs matplotlib"):
        plot(sides(), tmp_path / "out.png")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "/no/such"], "--model: /no/such is not there"),
        (["--json", "/no/such/file.json"], "--json: /no/such is no directory"),
        (["--plot", "/no/such/file.png"], "--plot: /no/such is no directory"),
    ],
)
def test_what_would_fail_in_the_end_fails_at_once(words, told, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["interference", *words])
    assert main() == 2
    assert capsys.readouterr().err == f"kvferry.ops.bench.interference: error: {told}\n"
