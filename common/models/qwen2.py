"""The Qwen2 family (Qwen2, Qwen2.5): Llama with biases on query, key and value, but not on the output projection."""

from dataclasses import replace

from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.decoder import DecoderModel
from kvferry.common.models.family import Family, HfSettings
from kvferry.common.models.hf_settings import decoder_config, default_head_dim, layer_windows


def read_config(hf: HfSettings) -> TransformerConfig:
    settings = hf.model
    config = decoder_config(
        hf,
        num_kv_heads=settings.integer("num_key_value_heads"),
        head_dim=default_head_dim(settings),
        max_positions=settings.integer("max_position_embeddings"),
    )
    return replace(config, attention_bias=True, windows=layer_windows(settings, config.num_layers))


FAMILY = Family(DecoderModel, read_config)
