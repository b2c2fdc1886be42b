"""`python -m kvferry.ops.bench.interference`: table and plot of known times, and errors before the start."""

import sys
from pathlib import Path

import pytest

from kvferry.common.base.errors import ConfigError, KvferryError
from kvferry.ops.bench.interference import Side, interference_table, main, plot
from kvferry.ops.bench.serve.load import RequestLoad
from kvferry.ops.bench.serve.report import Frame, ServeReport, make_report
from kvferry.ops.bench.serve.request import RequestOutcome

FRAME = Frame("http://x", "m", "infer", 1, cpu_s=0.5)
LOAD = RequestLoad(2, 4, 3, 2, None, 1, 50)


def answers(gap_s: float, *, failed: int = 0) -> ServeReport:
    """A report of answers of three tokens, the first after 0.5 s, the others `gap_s` apart."""
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


def test_the_table_has_a_line_for_each_layout():
    head, split, colocated = interference_table(sides())
    assert head.split()[:3] == ["ms", "alone", "p50"]
    assert split.split() == ["split", "10.0", "10.0", "20.0", "20.0", "20.0", "500.0", "500.0", "2"]
    assert colocated.split()[-3:] == ["2,", "1", "failed"]


def test_answers_of_one_token_are_an_error():
    single = make_report(FRAME, LOAD, [RequestOutcome(due=0.0, ended=1.0, arrivals=[(0.5, 1)], tokens=1)])
    with pytest.raises(KvferryError, match="too short"):
        list(interference_table([Side("split", (), single, single, single)]))


def test_the_plot_is_a_picture(tmp_path: Path):
    plot(sides(), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="requires matplotlib"):
        plot(sides(), tmp_path / "out.png")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--model", "/no/such"], "--model: /no/such does not exist"),
        (["--json", "/no/such/file.json"], "--json: /no/such is not a directory"),
        (["--plot", "/no/such/file.png"], "--plot: /no/such is not a directory"),
    ],
)
def test_wrong_paths_are_rejected_before_the_start(words, error, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["interference", *words])
    assert main() == 2
    assert capsys.readouterr().err == f"kvferry.ops.bench.interference: error: {error}\n"
