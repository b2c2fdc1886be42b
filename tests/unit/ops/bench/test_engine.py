"""`kvferry bench engine` on a small model: it reports every case, and counts the least work of a step correctly."""

import json
from pathlib import Path

import pytest
import torch

from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.load import read_hf_config
from kvferry.ops.bench import engine
from kvferry.ops.bench.limits import MachineLimits, step_needs
from kvferry.ops.cli.main import main
from tests.support.tiny_llama import make_checkpoint


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets these for its own process."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.setenv(variable, "1")


@pytest.fixture
def config(tmp_path: Path) -> TransformerConfig:
    make_checkpoint(tmp_path)
    return read_hf_config(tmp_path)


def test_work_of_a_decode_step(config: TransformerConfig) -> None:
    needs = step_needs(config, torch.bfloat16, new=1, context=9, sequences=3)
    assert needs is not None
    projections = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.hidden_size
    layers = config.num_layers * (projections + 3 * config.hidden_size * config.intermediate_size)
    weights = layers + config.vocab_size * config.hidden_size
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 10 * 3
    assert needs.bytes_read == 2 * (weights + cached)
    assert needs.flop == 2 * 3 * weights + 4 * config.num_layers * config.num_heads * config.head_dim * 10 * 3


def test_the_limit_is_the_slower_of_memory_and_matmul(config: TransformerConfig) -> None:
    needs = step_needs(config, torch.float32, new=1, context=0, sequences=1)
    assert needs is not None
    assert needs.tokens_per_s(1, MachineLimits(1.0, 1e9)) == pytest.approx(1e9 / needs.bytes_read)
    assert needs.tokens_per_s(7, MachineLimits(1e9, 1.0)) == pytest.approx(7e9 / needs.flop)


def test_every_case_is_reported(
    config: TransformerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "PROMPTS", (8, 32, config.max_position_embeddings + 1))
    monkeypatch.setattr(engine, "BATCHES", (1, 3))
    monkeypatch.setattr(engine, "CONTEXT", 20)
    arguments = ["bench", "engine", "--model", str(tmp_path), "--dtype", "float32", "--threads", "1"]
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"engine: loading {tmp_path.name}",
        "engine: prefill of 8 tokens (1 of 5)",
        "engine: prefill of 32 tokens (2 of 5)",
        "engine: decode of 1 sequence (3 of 5)",
        "engine: decode of 3 sequences (4 of 5)",
        "engine: limits of the machine (5 of 5)",
    ]
    report = json.loads(out)
    assert set(report["prefill"]) == {"8", "32"}
    assert set(report["decode"]) == {"1", "3"}
    for rate in (*report["prefill"].values(), *report["decode"].values()):
        assert rate["tok_s"] > 0
        assert rate["of_limit"] > 0
    assert report["machine"]["read_gb_s"] > 0
    assert report["machine"]["matmul_gflop_s"] > 0
    assert (report["dtype"], report["threads"], report["model"]) == ("float32", 1, tmp_path.name)
    assert report["ready_s"] > 0
    assert report["rss_mb"] > 0
    assert main(arguments) == 0
    assert "of the limit" in capsys.readouterr().out


@pytest.mark.slow
def test_tensor_parallel_is_measured_and_an_invalid_size_rejected(
    config: TransformerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "PROMPTS", (8,))
    monkeypatch.setattr(engine, "BATCHES", (2,))
    monkeypatch.setattr(engine, "CONTEXT", 20)
    arguments = ["bench", "engine", "--model", str(tmp_path), "--dtype", "float32", "--threads", "1", "--json"]
    assert main([*arguments, "--tp", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"] == 2
    assert report["prefill"]["8"]["tok_s"] > 0
    assert report["decode"]["2"]["tok_s"] > 0
    assert main([*arguments, "--tp", "4"]) != 0
    assert "num_attention_heads is 6, which is not divisible by 4" in capsys.readouterr().err


def test_a_missing_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--model", str(tmp_path / "none")]) != 0
    assert "none" in capsys.readouterr().err
