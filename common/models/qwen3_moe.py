"""The Qwen3-MoE family: Qwen3 with experts in place of the MLP, in all layers or in some."""

from dataclasses import replace

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.config import MoeConfig, TransformerConfig
from kvferry.common.models.decoder import DecoderModel
from kvferry.common.models.family import Family, HfSettings
from kvferry.common.models.hf_settings import decoder_config, default_head_dim
from kvferry.common.models.moe import check_experts
from kvferry.common.models.settings import Settings


def read_config(hf: HfSettings) -> TransformerConfig:
    settings = hf.model
    config = decoder_config(
        hf,
        num_kv_heads=settings.integer("num_key_value_heads"),
        head_dim=default_head_dim(settings),
        max_positions=settings.integer("max_position_embeddings"),
    )
    bias = settings.flag("attention_bias")
    return replace(
        config,
        qk_norm=True,
        attention_bias=bias,
        output_bias=bias,
        windows=_windows(settings, config.num_layers),
        moe=_experts(settings, config.num_layers),
    )


def _windows(settings: Settings, num_layers: int) -> tuple[int, ...]:
    """One window for all layers. `max_window_layers` has no effect without a window; with one, implementations differ
    in its meaning, so only 0 is accepted."""
    if not settings.flag("use_sliding_window"):
        settings.ignore("sliding_window", "max_window_layers")
        return ()
    settings.require("max_window_layers", (0,))
    return (settings.integer("sliding_window"),) * num_layers if settings.get("sliding_window") is not None else ()


def _experts(settings: Settings, num_layers: int) -> MoeConfig:
    settings.ignore("output_router_logits", "router_aux_loss_coef")
    # transformers writes one of these names, published files have the other.
    name = "num_experts" if settings.has("num_experts") else "num_local_experts"
    dense = settings.get("mlp_only_layers") or []
    every = settings.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in dense):
        raise ModelLoadError(f"config.json: mlp_only_layers must be a list of layer indices, found {dense!r}")
    moe = MoeConfig(
        layers=tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % every == 0),
        num_experts=settings.integer(name),
        experts_per_token=settings.integer("num_experts_per_tok"),
        intermediate_size=settings.integer("moe_intermediate_size"),
        normalise=settings.flag("norm_topk_prob"),
    )
    check_experts(moe)
    return moe


FAMILY = Family(DecoderModel, read_config)
