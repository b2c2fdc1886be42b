"""`kvferry bench engine --peers`: the same cases in other engines, or the reason why not, and the comparison."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.common.models.gguf_config import read_gguf_config
from kvferry.common.models.weights_gguf import GgufWeights
from kvferry.common.tokenizer.gguf_header import read_gguf_header
from kvferry.ops.bench import engine
from kvferry.ops.bench.peers.child import PACKAGES
from kvferry.ops.bench.peers.comparison import compare_with_peers, comparison_table
from kvferry.ops.bench.peers.gguf_copy import copy_gguf
from kvferry.ops.bench.peers.run import installed, measure_peer
from kvferry.ops.bench.peers.spec import PeerTask
from kvferry.ops.bench.report import EngineReport, MachineFacts, PeerReport, Rate
from kvferry.ops.cli.main import main
from tests.support.tiny_gguf import vocabulary, write_gguf
from tests.support.tiny_llama import make_checkpoint


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets these for its own process."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.setenv(variable, "1")


def task(model: Path, **changes: object) -> PeerTask:
    fields: dict[str, object] = {"model": str(model), "dtype": "float32", "threads": 1, "prompts": [8], "batches": [2]}
    fields |= {"context": 10, "decode_steps": 3, "rounds": 2, "vocab_size": 199}
    return PeerTask(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.slow
def test_every_peer_has_all_cases_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path)
    monkeypatch.setattr(engine, "PROMPTS", (8, 32))
    monkeypatch.setattr(engine, "BATCHES", (1, 3))
    monkeypatch.setattr(engine, "CONTEXT", 20)
    arguments = ["bench", "engine", "--model", str(tmp_path), "--dtype", "float32", "--threads", "1", "--peers"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    peers = {peer["name"]: peer for peer in report["peers"]}
    assert set(peers) == set(PACKAGES)
    assert peers["transformers"]["error"] == ""
    for peer in peers.values():
        if not peer["error"]:
            assert (set(peer["prefill"]), set(peer["decode"])) == (set(report["prefill"]), set(report["decode"]))
            assert all(rate["tok_s"] > 0 for rate in (*peer["prefill"].values(), *peer["decode"].values()))
            assert peer["ready_s"] > 0
            assert peer["rss_mb"] > 0
    assert [row["row"] for row in report["rows"]] == [
        "prefill 8, tokens/s", "prefill 32, tokens/s", "decode 1, tokens/s", "decode 3, tokens/s", "ready, s",
        "memory, MB",
    ]  # fmt: skip
    assert all(row["best_peer"] is not None for row in report["rows"])


def test_a_failed_peer_reports_its_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    outcome = measure_peer("transformers", sys.executable, task(tmp_path), tmp_path)
    assert outcome.times is None
    assert "no such type" in outcome.error


def test_peers_without_support_for_a_model_report_it(tmp_path: Path) -> None:
    outcome = measure_peer("llamacpp", sys.executable, task(tmp_path), tmp_path)
    assert (outcome.times, outcome.error) == (None, "reads only GGUF files; name one with --model")
    assert not any(tmp_path.iterdir())
    assert measure_peer("openvino", sys.executable, task(tmp_path), tmp_path).error == "does not support float32"


def test_a_peer_python_that_does_not_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "transformers" in installed([sys.executable])
    make_checkpoint(tmp_path / "model")
    words = ["bench", "engine", "--model", str(tmp_path / "model"), "--peers", "--peer-python", str(tmp_path / "none")]
    assert main(words) == 2
    assert "--peer-python" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_a_gguf_copy_has_the_same_weights(tmp_path: Path, kind: str) -> None:
    source, target = tmp_path / "tiny.gguf", tmp_path / "copy.gguf"
    write_gguf(source, make_checkpoint(tmp_path / "model", vocab_size=len(vocabulary()[0])))
    copy_gguf(source, target, kind)
    old, new = (read_gguf_header(path) for path in (source, target))
    assert {name: value for name, value in old.metadata.items() if name != "general.file_type"} == {
        name: value for name, value in new.metadata.items() if name != "general.file_type"
    }
    config = read_gguf_config(old)
    assert read_gguf_config(new) == config
    tolerance = {"F16": 1e-3, "BF16": 8e-3, "F32": 0.0}[kind]
    with GgufWeights(source, old, config) as wanted, GgufWeights(target, new, config) as got:
        assert got.names() == wanted.names()
        for name in wanted.names():
            np.testing.assert_allclose(got.get(name), wanted.get(name), rtol=tolerance, atol=1e-6)


# -- comparison


def report_with(*peers: PeerReport) -> EngineReport:
    return EngineReport(
        model="m", dtype="bfloat16", quantization="none", threads=2, ops="o", machine=MachineFacts(1.0, 1.0),
        prefill={"128": Rate(1000.0, 0.5)},
        decode={"1": Rate(90.0, None), "8": Rate(100.0, None)}, ready_s=2.0, rss_mb=500, peers=list(peers),
    )  # fmt: skip


def test_rows_compare_with_the_best_peer() -> None:
    slow = PeerReport("slow", prefill={"128": Rate(10.0, None)}, decode={"1": Rate(1.0, None)}, ready_s=9.0, rss_mb=400)
    fast = PeerReport(
        "fast", prefill={"128": Rate(960.0, None)}, decode={"1": Rate(92.0, None)}, ready_s=9.5, rss_mb=900
    )
    broken = PeerReport("broken", error="out of memory")
    report = report_with(slow, fast, broken)
    rows = {row.row: row for row in compare_with_peers(report)}
    prefill, one, eight = (rows[f"{case}, tokens/s"] for case in ("prefill 128", "decode 1", "decode 8"))
    assert (prefill.best_peer, prefill.peer, prefill.target, prefill.met) == (960.0, "fast", 1008.0, False)
    assert (one.target, one.met) == (87.4, True)
    assert (eight.best_peer, eight.met) == (None, None)
    assert (rows["ready, s"].peer, rows["ready, s"].met) == ("slow", True)
    assert (rows["memory, MB"].best_peer, rows["memory, MB"].met) == (400.0, False)
    table = "\n".join(comparison_table(report, compare_with_peers(report)))
    assert "broken: out of memory" in table


def test_without_peers_there_are_no_targets() -> None:
    assert all(row.met is None and row.target is None for row in compare_with_peers(report_with()))
