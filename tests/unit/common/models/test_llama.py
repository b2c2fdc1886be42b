"""Small random Llama checkpoints of every variation generate the same greedy tokens as transformers."""

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from kvferry.common.device.cpu import CpuDevice
from kvferry.common.models.load import load_model
from tests.support.cpu_ops import OP_SETS, cpu_with
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_llama import make_checkpoint, random_prompt, reference_tokens

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_kv_head": {"num_key_value_heads": 1},
    "no_groups": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    "wide_heads": {"head_dim": 20},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "linear": {"rope_parameters": LINEAR},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
}
LENGTHS = (1, 2, 9, 40, 83)
NEW_TOKENS = 12


@pytest.fixture(params=OP_SETS)
def device(request: pytest.FixtureRequest) -> CpuDevice:
    return cpu_with(request.param)


@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.parametrize("chunk", [7, 1 << 30])
def test_greedy_tokens_equal_transformers(device: CpuDevice, name: str, chunk: int, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, **VARIATIONS[name])
    driver = EngineDriver(load_model(tmp_path, device=device, progress=False))
    prompts = [random_prompt(length, length) for length in LENGTHS]
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.generate(sequences, NEW_TOKENS, chunk)
    wanted = [reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts]
    assert [sequence.output for sequence in sequences] == wanted
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted), (
        "the reference's output does not depend on the prompt"
    )


def test_sharded_files_give_the_same_tokens_as_one_file(tmp_path: Path) -> None:
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    make_checkpoint(whole)
    make_checkpoint(shards, max_shard_size="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    outputs = []
    for path in (whole, shards):
        driver = EngineDriver(load_model(path, device=CpuDevice(), progress=False))
        sequence = driver.add(random_prompt(3, 20))
        driver.generate([sequence], NEW_TOKENS)
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]


def test_setting_names_before_transformers_5_are_read(tmp_path: Path) -> None:
    """`rope_theta` with `rope_scaling`, and `torch_dtype`, mean the same as the newer names."""
    reference = make_checkpoint(tmp_path, rope_parameters=LLAMA3)
    path = tmp_path / "config.json"
    config = orjson.loads(path.read_bytes())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_bytes(orjson.dumps(config))
    driver = EngineDriver(load_model(tmp_path, device=CpuDevice(), progress=False))
    prompt = random_prompt(4, 50)
    sequence = driver.add(prompt)
    driver.generate([sequence], NEW_TOKENS)
    assert sequence.output == reference_tokens(reference, prompt, NEW_TOKENS)


def test_bfloat16_stays_near_float32(device: CpuDevice, tmp_path: Path) -> None:
    """The first token of the bfloat16 run has nearly the best logit of the float32 reference."""
    reference = make_checkpoint(tmp_path, initializer_range=0.1)
    driver = EngineDriver(load_model(tmp_path, device=device, dtype="bfloat16", progress=False))
    prompts = [random_prompt(seed, 30) for seed in range(5)]
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.generate(sequences, 1, chunk=11)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt])).logits[0, -1]
        assert logits.max() - logits[sequence.output[0]] < 0.05 * (logits.max() - logits.min())
