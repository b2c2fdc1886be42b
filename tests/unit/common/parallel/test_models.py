"""A model sharded over ranks gives the tokens of the whole one in float32, for every family.

Equal tokens, not equal bits: sums over ranks add the same numbers in another order.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.engine.kv_cache import bytes_per_token
from kvferry.common.models.load import load_model
from kvferry.common.models.weights import Part
from kvferry.common.models.weights_hf import HfWeights
from kvferry.common.parallel.collectives import GroupCollectives
from kvferry.common.parallel.shard import Shard
from kvferry.common.protocol.sampling_params import SamplingParams
from tests.support.cpu_ops import cpu_with
from tests.support.engine_driver import EngineDriver
from tests.support.rank_threads import load_ranks, rank_driver
from tests.support.real_model import real_model_path
from tests.support.tiny_families import make_family_checkpoint
from tests.support.tiny_llama import greedy_after, make_checkpoint, random_prompt

NEW_TOKENS = 8
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "llama_biases": (2, "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": (4, "llama", {**FOUR, "tie_word_embeddings": True}),
    "llama_three": (3, "llama", {"num_key_value_heads": 3, "intermediate_size": 81}),
    "mistral": (2, "mistral", {"sliding_window": 9}),
    "mistral_four": (4, "mistral", {**FOUR, "sliding_window": 30}),
    "qwen2_tied": (2, "qwen2", {"tie_word_embeddings": True}),
    "qwen2_four": (4, "qwen2", FOUR),
    "qwen3": (2, "qwen3", {"attention_bias": True}),
    "qwen3_four": (4, "qwen3", FOUR),
    "qwen3_moe": (2, "qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe_four": (4, "qwen3_moe", {**FOUR, "norm_topk_prob": True}),
    "deepseek_v2": (2, "deepseek_v2", {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    "deepseek_v2_four": (4, "deepseek_v2", {**FOUR, "num_key_value_heads": 8}),
    "deepseek_v3": (2, "deepseek_v3", {"attention_bias": True, "tie_word_embeddings": True}),
    "deepseek_v3_three": (3, "deepseek_v3", {"moe_intermediate_size": 24, "intermediate_size": 81}),
}


def _checkpoint(directory: Path, family: str, changes: dict[str, Any]) -> Any:
    make = make_checkpoint if family == "llama" else None
    return make(directory, **changes) if make else make_family_checkpoint(directory, family, **changes)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_of_a_sharded_model_equal_transformers(name: str, tmp_path: Path) -> None:
    size, family, changes = CASES[name]
    reference = _checkpoint(tmp_path, family, changes)
    ranks = load_ranks(tmp_path, size)
    prompts = [random_prompt(length, length) for length in (1, 9, 40)]
    with rank_driver(ranks) as driver:
        sequences = [driver.add(prompt) for prompt in prompts]
        driver.generate(sequences, NEW_TOKENS, chunk=7)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.output == greedy_after(reference, prompt, sequence.output)


def test_sampled_tokens_equal_those_of_one_rank_on_native_ops(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    device = cpu_with("native")
    sampling = SamplingParams(max_new_tokens=99, do_sample=True, temperature=0.9, seed=7, repetition_penalty=1.2)
    prompt = random_prompt(3, 20)

    def sample(driver: EngineDriver) -> list[int]:
        sequence = driver.add(prompt, sampling)
        driver.generate([sequence], 24)
        return sequence.output

    alone = sample(EngineDriver(load_model(tmp_path, device=device, progress=False), device))
    with rank_driver(load_ranks(tmp_path, 2, device), device) as driver:
        assert sample(driver) == alone


def test_each_rank_caches_its_own_heads_or_the_whole_latent(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "heads")
    make_family_checkpoint(tmp_path / "latent", "deepseek_v2")
    for name, divisor in (("heads", 2), ("latent", 1)):
        whole = load_model(tmp_path / name, device=CpuDevice(1), progress=False)
        for rank in load_ranks(tmp_path / name, 2):
            assert bytes_per_token(rank.kv_specs, 1) * divisor == bytes_per_token(whole.kv_specs, 1)
            assert [s.whole_shape(2) for s in rank.kv_specs] == [s.shape_per_token for s in whole.kv_specs]


@pytest.mark.parametrize(
    ("size", "family", "changes", "names"),
    [
        (4, "llama", {}, "num_attention_heads is 6"),
        (3, "llama", {}, "num_key_value_heads is 2"),
        (2, "llama", {"intermediate_size": 81}, "intermediate_size is 81"),
        (3, "qwen3_moe", {"num_key_value_heads": 3}, "moe_intermediate_size is 20"),
    ],
)
def test_a_size_that_does_not_divide_is_rejected_by_name(
    size: int, family: str, changes: dict[str, Any], names: str, tmp_path: Path
) -> None:
    _checkpoint(tmp_path, family, {**({"intermediate_size": 81} if family == "qwen3_moe" else {}), **changes})
    with pytest.raises(ModelLoadError, match=f"node.tensor_parallel = {size}: the model's {names}"):
        load_model(tmp_path, device=CpuDevice(1), progress=False, collectives=GroupCollectives(Shard(0, size)))


def test_a_part_of_a_tensor_equals_that_slice_of_the_whole(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with HfWeights(tmp_path) as weights:
        for name in weights.names():
            whole = weights.get(name)
            assert weights.shape(name) == tuple(whole.shape)
            for axis in range(whole.dim()):
                part = Part(axis, 8, 16)
                assert torch.equal(weights.get(name, part), part.cut(whole))


def test_parts_are_equal_and_the_last_ones_take_the_remainder() -> None:
    assert [Shard(rank, 3).span(199) for rank in range(3)] == [(0, 67), (67, 134), (134, 199)]
    assert [Shard(rank, 4).span(5) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_over_three_ranks_gives_the_same_tokens_as_on_one() -> None:
    """9 heads and 3 KV heads over 3 ranks, float32; that one rank equals transformers is tested elsewhere."""
    device = cpu_with("torch")
    chooser = random.Random(4)
    prompts = [[chooser.randrange(49152) for _ in range(length)] for length in (1, 20, 77)]

    def outputs(driver: EngineDriver) -> list[list[int]]:
        sequences = [driver.add(prompt) for prompt in prompts]
        driver.generate(sequences, NEW_TOKENS, chunk=40)
        return [sequence.output for sequence in sequences]

    alone = outputs(EngineDriver(load_model(real_model_path(), device=device, dtype="float32", progress=False), device))
    with rank_driver(load_ranks(real_model_path(), 3, device, dtype="float32"), device) as driver:
        assert outputs(driver) == alone
