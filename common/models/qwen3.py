"""The Qwen3 family: queries and keys are normalised per head before rotation; attention biases on all or none."""

from dataclasses import replace

from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.decoder import DecoderModel
from kvferry.common.models.family import Family, HfSettings
from kvferry.common.models.hf_settings import decoder_config, layer_windows

_DEFAULT_HEAD_DIM = 128


def read_config(hf: HfSettings) -> TransformerConfig:
    """The head size is independent of the hidden size."""
    settings = hf.model
    config = decoder_config(
        hf,
        num_kv_heads=settings.integer("num_key_value_heads"),
        head_dim=settings.integer("head_dim", _DEFAULT_HEAD_DIM),
        max_positions=settings.integer("max_position_embeddings"),
    )
    bias = settings.flag("attention_bias")
    windows = layer_windows(settings, config.num_layers)
    return replace(config, qk_norm=True, attention_bias=bias, output_bias=bias, windows=windows)


FAMILY = Family(DecoderModel, read_config)
