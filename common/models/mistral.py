"""The Mistral family: Llama without biases, with an optional sliding window."""

from dataclasses import replace

from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.decoder import DecoderModel
from kvferry.common.models.family import Family, HfSettings
from kvferry.common.models.hf_settings import decoder_config, default_head_dim

_DEFAULT_WINDOW = 4096


def read_config(hf: HfSettings) -> TransformerConfig:
    """`sliding_window` applies to all layers: null means none, a missing key means 4096, the family's default."""
    settings = hf.model
    config = decoder_config(
        hf,
        num_kv_heads=settings.integer("num_key_value_heads"),
        head_dim=default_head_dim(settings),
        max_positions=settings.integer("max_position_embeddings"),
    )
    no_window = settings.has("sliding_window") and settings.get("sliding_window") is None
    window = 0 if no_window else settings.integer("sliding_window", _DEFAULT_WINDOW)
    return replace(config, windows=(window,) * config.num_layers if window else ())


FAMILY = Family(DecoderModel, read_config)
