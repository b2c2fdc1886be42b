"""Small random checkpoints of every family, saved with transformers, which is also the reference."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.tiny_llama import BASE

_MLA = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 12}),
    "deepseek_v2": (DeepseekV2Config, _MLA),
    "deepseek_v3": (DeepseekV3Config, {**_MLA, "n_group": 4, "topk_group": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    ),
}


def make_family_checkpoint(directory: Path, family: str, **changes: Any) -> PreTrainedModel:
    """Save a random model (seeded) as a HuggingFace directory; returns it, in float32, as the reference."""
    torch.manual_seed(20)
    config_class, own = CONFIGS[family]
    config = config_class(**{**BASE, **own, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        # Initial zeros and ones would hide whether biases and norms are applied.
        for name, tensor in model.state_dict().items():
            if name.endswith("bias") or "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(directory)
    return model
