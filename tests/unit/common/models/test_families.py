"""Small random checkpoints of every family and variation generate the same greedy tokens as transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.common.device.base import Device
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.native.build import find_compiler
from kvferry.common.models.load import load_model
from tests.support.cpu_ops import cpu_with
from tests.support.engine_driver import EngineDriver
from tests.support.paged_device import PagedDevice
from tests.support.tiny_families import make_family_checkpoint
from tests.support.tiny_llama import greedy_after, random_prompt, reference_tokens

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "mistral_window": ("mistral", {"sliding_window": 9}),
    "mistral_window_of_one": ("mistral", {"sliding_window": 1, "head_dim": 20}),
    "mistral_wide_window": ("mistral", {"sliding_window": 300, "tie_word_embeddings": True}),
    "mistral_linear": ("mistral", {"sliding_window": 30, "rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows_unused": ("qwen2", {"sliding_window": 5, "max_window_layers": 1}),
    "qwen2_windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2_layer_types": ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "layer_types": MIXED}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied_biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_one_kv_head": ("qwen3", {"num_key_value_heads": 1, "head_dim": 8}),
    "qwen3_windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_normalised": ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 3}),
    "qwen3_moe_some_layers": ("qwen3_moe", {"decoder_sparse_step": 2, "attention_bias": True}),
    "qwen3_moe_dense_layers": ("qwen3_moe", {"mlp_only_layers": [0, 2], "tie_word_embeddings": True}),
    "qwen3_moe_window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
}
YARN_MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
VARIATIONS |= {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2_no_q_rank": ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    "deepseek_v2_groups": ("deepseek_v2", {**GROUPED, "routed_scaling_factor": 1.7, "n_shared_experts": 1}),
    "deepseek_v2_yarn": ("deepseek_v2", {"rope_parameters": YARN_MSCALE, "first_k_dense_replace": 0}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_biases": ("deepseek_v3", {"attention_bias": True, "tie_word_embeddings": True}),
    "deepseek_v3_halves": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    "deepseek_v3_not_normalised": ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    "deepseek_v3_one_group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3}),
    "deepseek_v3_yarn": ("deepseek_v3", {"rope_parameters": YARN_MSCALE, "attention_bias": True, "q_lora_rank": None}),
    "deepseek_v3_yarn_without_mscale": ("deepseek_v3", {"rope_parameters": YARN}),
}
LENGTHS = (1, 9, 40, 83)
NEW_TOKENS = 8


@pytest.mark.parametrize("name", VARIATIONS)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """One batch per op table: chunks of 7, whole prompts, chunks of 9."""
    reference = make_family_checkpoint(tmp_path, VARIATIONS[name][0], **VARIATIONS[name][1])
    prompts = [random_prompt(length, length) for length in LENGTHS]
    devices: list[tuple[Device, int]] = [(CpuDevice(1), 7), (PagedDevice(), 1 << 30)]
    if find_compiler():
        devices.append((cpu_with("native"), 9))
    for device, chunk in devices:
        driver = EngineDriver(load_model(tmp_path, device=device, progress=False), device)
        sequences = [driver.add(prompt) for prompt in prompts]
        driver.generate(sequences, NEW_TOKENS, chunk)
        outputs = [sequence.output for sequence in sequences]
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output == greedy_after(reference, prompt, output), (type(device.ops).__name__, chunk)
        assert len({tuple(output) for output in outputs}) == len(outputs), "the output does not depend on the prompt"


CACHE_KINDS = ["mistral_window", "qwen2", "qwen3_moe", "deepseek_v2_groups", "deepseek_v3_yarn"]
"""One variation for each kind of cache and attention."""


@pytest.mark.parametrize("name", CACHE_KINDS)
@pytest.mark.parametrize("cached", [0, 8])
def test_decoding_continues_in_another_cache(name: str, cached: int, tmp_path: Path) -> None:
    """Prefill in one cache, transfer the layers out of order to another block size and layout, decode there."""
    reference = make_family_checkpoint(tmp_path, VARIATIONS[name][0], **VARIATIONS[name][1])
    prompt = random_prompt(8, 37)
    wanted = reference_tokens(reference, prompt, NEW_TOKENS)
    here = EngineDriver(load_model(tmp_path, device=CpuDevice(1), progress=False), block_size=4)
    paged = PagedDevice()
    there = EngineDriver(load_model(tmp_path, device=paged, progress=False), paged, block_size=8)
    source = here.add(prompt)
    here.generate([source], 1, chunk=11)
    first = there.add(prompt[:cached] or prompt)
    if cached:
        there.generate([first], 1)
    target = there.add(source.ids, prompt_length=len(prompt))
    there.share_prefix(first, target, cached // 8)
    there.reserve(target, len(prompt))
    for layers in ((2, 3), (0, 2)):
        data = here.cache.read(*layers, source.blocks, cached, len(prompt))
        assert len(data) == here.cache.range_bytes(*layers, cached, len(prompt))
        there.cache.write(*layers, target.blocks, cached, len(prompt), data)
    target.computed = len(prompt)
    there.generate([target], NEW_TOKENS)
    assert target.output == wanted


@pytest.mark.parametrize("name", CACHE_KINDS)
def test_a_shared_prefix_serves_several_sequences_in_a_batch(name: str, tmp_path: Path) -> None:
    reference = make_family_checkpoint(tmp_path, VARIATIONS[name][0], **VARIATIONS[name][1])
    driver = EngineDriver(load_model(tmp_path, device=CpuDevice(1), progress=False))
    common = random_prompt(1, 24)
    first = driver.add(common + random_prompt(2, 5))
    driver.generate([first], 2)
    others = [driver.add(common + random_prompt(seed, seed)) for seed in (3, 11, 26)]
    for other in others:
        driver.share_prefix(first, other, 6)
    driver.generate([first, *others], NEW_TOKENS, chunk=5)
    for sequence in (first, *others):
        prompt = sequence.ids[: sequence.prompt_length]
        assert sequence.output == reference_tokens(reference, prompt, NEW_TOKENS)


@pytest.mark.parametrize("name", CACHE_KINDS)
def test_bfloat16_differs_at_near_ties_only(name: str, tmp_path: Path) -> None:
    """The first token that differs from float32's has nearly the best logit in float32."""
    family, changes = VARIATIONS[name]
    reference = make_family_checkpoint(tmp_path, family, **{**changes, "initializer_range": 0.1})
    driver = EngineDriver(load_model(tmp_path, device=CpuDevice(1), dtype="bfloat16", progress=False))
    prompts = [random_prompt(seed, 30) for seed in range(6)]
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.generate(sequences, NEW_TOKENS, chunk=11)
    equal = 0
    for prompt, sequence in zip(prompts, sequences, strict=True):
        wanted = reference_tokens(reference, prompt, NEW_TOKENS)
        same = [ours == theirs for ours, theirs in zip(sequence.output, wanted, strict=True)]
        equal += all(same)
        if not all(same):
            at = same.index(False)
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + wanted[:at]])).logits[0, -1]
            assert logits.max() - logits[sequence.output[at]] < 0.05 * (logits.max() - logits.min())
    assert equal, "no sequence is entirely equal"
