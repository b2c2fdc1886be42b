"""Greedy tokens of small random checkpoints equal those of transformers, for every variation of every family."""

from pathlib import Path
from typing import Any

import pytest

from common.device.base import Device
from common.device.cpu import CpuDevice
from common.models.load import load_model
from tests.support.engine_driver import EngineDriver
from tests.support.paged_device import PagedDevice
from tests.support.tiny_families import make_family_checkpoint
from tests.support.tiny_llama import random_prompt, reference_tokens

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
LENGTHS = (1, 2, 9, 40, 83)
NEW_TOKENS = 12


@pytest.mark.parametrize("name", VARIATIONS)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """In one batch each: whole prompts, prompts in chunks of 7, and the other op table in chunks of 11."""
    reference = make_family_checkpoint(tmp_path, VARIATIONS[name][0], **VARIATIONS[name][1])
    prompts = [random_prompt(length, length) for length in LENGTHS]
    # With a window of one position the library's sliding cache keeps all of them.
    use_cache = name != "mistral_window_of_one"
    wanted = [reference_tokens(reference, prompt, NEW_TOKENS, use_cache) for prompt in prompts]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted), "the reference says the same whatever it is asked"
    devices: list[tuple[Device, int]] = [(CpuDevice(1), 1 << 30), (CpuDevice(1), 7), (PagedDevice(), 11)]
    for device, chunk in devices:
        driver = EngineDriver(load_model(tmp_path, device=device, progress=False), device)
        sequences = [driver.add(prompt) for prompt in prompts]
        driver.generate(sequences, NEW_TOKENS, chunk)
        assert [sequence.output for sequence in sequences] == wanted, (type(device).__name__, chunk)
