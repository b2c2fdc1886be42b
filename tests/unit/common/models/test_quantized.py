"""Whole models with quantised weights: every kind of layer supports them, and `bench perplexity` measures the loss."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from kvferry.common.device.base import Device
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.models.load import LoadedModel, load_model
from kvferry.ops.bench.perplexity import run_perplexity
from kvferry.ops.cli.bench_perplexity import DEFAULT_TEXT
from kvferry.ops.cli.main import main
from tests.support.cpu_ops import cpu_with
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_families import make_family_checkpoint
from tests.support.tiny_llama import make_checkpoint, random_prompt

SCHEMES: list[WeightScheme] = ["int8", "int4", "int8_dynamic"]
FAMILIES = ["llama", "qwen2", "qwen3_moe", "deepseek_v3"]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("quantized") / request.param
    if request.param == "llama":
        make_checkpoint(path)
    else:
        make_family_checkpoint(path, request.param)
    return path


def loaded(path: Path, device: Device, scheme: WeightScheme | None = None) -> LoadedModel:
    return load_model(path, device=device, dtype="float32", progress=False, scheme=scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_native_and_torch_give_the_same_tokens(checkpoint: Path, scheme: WeightScheme) -> None:
    outputs = []
    for device in (cpu_with("native"), cpu_with("torch")):
        driver = EngineDriver(loaded(checkpoint, device, scheme), device)
        sequence = driver.add(random_prompt(4, 21))
        driver.generate([sequence], 8)
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 8


def test_quantisation_changes_the_identity(checkpoint: Path) -> None:
    """So Hello refuses a node whose tokens would differ."""
    device = cpu_with("torch")
    identities = {loaded(checkpoint, device, scheme).identity for scheme in (None, *SCHEMES)}
    assert len(identities) == 1 + len(SCHEMES)


def test_perplexity_of_a_small_model(tmp_path: Path) -> None:
    """Equals that of transformers with full weights; quantisation changes it little."""
    model = make_checkpoint(tmp_path / "m")
    ids = random_prompt(9, 300)
    report = run_perplexity(tmp_path / "m", cpu_with("native"), "float32", ("random", ids), 128, progress=False)
    losses = []
    for start in range(0, len(ids), 128):
        window = torch.tensor([ids[start : start + 128]])
        logits = model(window).logits.detach()
        losses.append(functional.cross_entropy(logits[0, :-1], window[0, 1:], reduction="none"))
    assert [result.quantization for result in report.results] == ["none", *SCHEMES]
    assert report.results[0].over_full == 0.0
    assert report.results[0].perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-3)
    for result in report.results[1:]:
        assert 0 < abs(result.over_full) < 0.2


def test_the_perplexity_text_is_the_one_of_the_published_figures() -> None:
    """If you change the text, measure the table in ops/docs/bench.md again."""
    digest = hashlib.sha256(DEFAULT_TEXT.read_bytes()).hexdigest()
    assert digest == "c4f3b3a0718acddd7912a57a8ec54a1417ca8e47a05e68cf93ab06dc14c9e482"


def test_perplexity_refuses_missing_models_and_bad_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9\xff")
    for words, said in (
        (["--model", str(tmp_path / "none")], "none does not exist"),
        (["--text", str(tmp_path / "none")], f"error: --text: {tmp_path / 'none'}: No such file or directory\n"),
        (
            ["--text", str(tmp_path / "latin")],
            f"{tmp_path / 'latin'} is not UTF-8 text: invalid byte at offset 0\n",
        ),
    ):
        assert main(["bench", "perplexity", *words]) != 0
        assert said in capsys.readouterr().err
