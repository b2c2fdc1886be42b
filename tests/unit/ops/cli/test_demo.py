"""`kvferry demo` without its cluster: nothing is started for what cannot be asked, all is stopped after a failure."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.ops import model_store
from kvferry.ops.cli.main import main
from tests.support.tiny_gguf import write_gguf


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of clusters. Nobody listens where they claim to be."""
    events: list[str] = []

    @contextlib.contextmanager
    def cluster(*sizes: str) -> Iterator[tuple[str, str]]:
        events.append("started")
        yield "http://127.0.0.1:1", "m"
        events.append("stopped")

    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(model_store, "ensure_model", lambda: tmp_path / "m.gguf")
    monkeypatch.setattr("kvferry.ops.launcher.started.started_cluster", cluster)
    return events


def test_what_cannot_be_asked_is_refused_before_anything_starts(started: list[str], capsys):
    assert main(["demo", "--question", "q" * 3000]) == 2
    out, err = capsys.readouterr()
    assert (out, started) == ("", [])
    assert err.startswith("kvferry demo: error: --question: ")
    assert err.endswith(" tokens, at most 2048 are taken\n")


def test_after_a_failure_everything_is_stopped_and_says_so(started: list[str], capsys):
    assert main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert started == ["started", "stopped"]
    assert "\nready http://127.0.0.1:1 model=m\n" in out
    assert out.endswith("\nstopped\n")
    assert err == "kvferry demo: error: http://127.0.0.1:1: Connection refused\n"
