"""`kvferry demo` with a fake cluster: a wrong question starts nothing, and a failure stops the cluster."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.ops import model_store
from kvferry.ops.cli.main import main
from tests.support.tiny_gguf import write_gguf


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events of fake clusters, whose address refuses connections."""
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


def test_a_question_that_is_too_long_is_rejected_before_the_start(started: list[str], capsys):
    assert main(["demo", "--question", "q" * 3000]) == 2
    out, err = capsys.readouterr()
    assert (out, started) == ("", [])
    assert err.startswith("kvferry demo: error: --question: ")
    assert err.endswith(" tokens; at most 2048 are allowed (router.max_input_length)\n")


def test_the_cluster_is_stopped_after_a_failure(started: list[str], capsys):
    assert main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert started == ["started", "stopped"]
    assert "\nready http://127.0.0.1:1 model=m\n" in out
    assert out.endswith("\nstopped\n")
    assert err == "kvferry demo: error: http://127.0.0.1:1: Connection refused\n"
