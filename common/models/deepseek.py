"""The DeepSeek-V2 and V3 families: latent attention; some dense layers, then experts plus a shared MLP.

The two score experts differently and name their settings differently, so each has its own reader. The extra layers for
multi-token prediction in V3 checkpoints are not loaded, since the next token does not depend on them.
"""

from dataclasses import replace
from typing import Literal

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.config import MlaConfig, MoeConfig, TransformerConfig
from kvferry.common.models.decoder import DecoderModel
from kvferry.common.models.family import Family, HfSettings
from kvferry.common.models.hf_settings import decoder_config
from kvferry.common.models.moe import check_experts
from kvferry.common.models.settings import Settings

_WITHOUT_EFFECT = ("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef", "auto_map")
"""Training settings, and the reference to the publisher's own code, which this family reimplements."""


def read_v2_config(hf: HfSettings) -> TransformerConfig:
    """Experts are scored by softmax and chosen from all, or from the groups with the best single expert."""
    settings = hf.model
    settings.require("scoring_func", ("softmax",))
    # If set, the publisher's code divides by the sum and transformers does not; no published checkpoint sets it.
    settings.require("norm_topk_prob", (False,))
    method = settings.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise settings.unsupported("topk_method", method)
    grouped = method == "group_limited_greedy"
    if not grouped:
        settings.ignore("n_group", "topk_group")
    config = _decoder(hf, interleaved=True)
    moe = _experts(settings, config.num_layers, settings.whole_number("first_k_dense_replace", 0), "softmax", grouped)
    return replace(config, mlp_bias=settings.flag("mlp_bias"), moe=moe)


def read_v3_config(hf: HfSettings) -> TransformerConfig:
    """Experts are scored by sigmoid and chosen with a learned bias from the groups with the best two experts."""
    settings = hf.model
    settings.require("scoring_func", ("sigmoid",))
    settings.require("topk_method", ("noaux_tc",))
    config = _decoder(hf, interleaved=settings.flag("rope_interleave", default=True))
    extra = max(settings.whole_number(name, 0) for name in ("num_nextn_predict_layers", "num_mtp_layers"))
    moe = _experts(settings, config.num_layers, settings.whole_number("first_k_dense_replace", 3), "sigmoid", True)
    moe = replace(moe, has_score_bias=True, normalise=settings.flag("norm_topk_prob", default=True))
    return replace(config, moe=moe, extra_layers=extra)


def _decoder(hf: HfSettings, interleaved: bool) -> TransformerConfig:
    settings = hf.model
    settings.ignore(*_WITHOUT_EFFECT)
    heads = settings.integer("num_attention_heads")
    mla = MlaConfig(
        q_lora_rank=settings.integer("q_lora_rank") if settings.get("q_lora_rank") is not None else None,
        kv_lora_rank=settings.integer("kv_lora_rank"),
        nope_head_dim=settings.integer("qk_nope_head_dim"),
        rope_head_dim=settings.integer("qk_rope_head_dim"),
        v_head_dim=settings.integer("v_head_dim"),
        interleaved=interleaved,
    )
    head_dim = mla.nope_head_dim + mla.rope_head_dim
    settings.require("num_key_value_heads", (heads,))
    settings.require("head_dim", (mla.rope_head_dim,))
    settings.require("qk_head_dim", (head_dim,))
    if mla.rope_head_dim % 2:
        raise ModelLoadError(f"config.json: qk_rope_head_dim must be even, found {mla.rope_head_dim}")
    max_positions = settings.integer("max_position_embeddings")
    config = decoder_config(hf, num_kv_heads=heads, head_dim=head_dim, max_positions=max_positions)
    bias = settings.flag("attention_bias")
    return replace(config, mla=mla, attention_bias=bias, output_bias=bias)


def _experts(
    settings: Settings, num_layers: int, dense_layers: int, scoring: Literal["softmax", "sigmoid"], grouped: bool
) -> MoeConfig:
    settings.require("moe_layer_freq", (1,))
    size = settings.integer("moe_intermediate_size")
    moe = MoeConfig(
        layers=tuple(range(dense_layers, num_layers)),
        num_experts=settings.integer("n_routed_experts"),
        experts_per_token=settings.integer("num_experts_per_tok"),
        intermediate_size=size,
        shared_intermediate_size=size * settings.integer("n_shared_experts"),
        scoring=scoring,
        num_groups=settings.integer("n_group") if grouped else 1,
        groups_kept=settings.integer("topk_group") if grouped else 1,
        group_score_experts=2 if scoring == "sigmoid" else 1,
        scaling=settings.number("routed_scaling_factor"),
        float32_router=True,
    )
    check_experts(moe)
    return moe


FAMILY_V2 = Family(DecoderModel, read_v2_config)
FAMILY_V3 = Family(DecoderModel, read_v3_config)
