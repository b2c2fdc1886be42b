"""The Llama family: grouped heads, rotary embedding, gated MLP.

Llama 1 to 3.3, SmolLM and every other checkpoint with architecture LlamaForCausalLM.
"""

from dataclasses import replace

from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.decoder import DecoderModel
from kvferry.common.models.family import Family, HfSettings
from kvferry.common.models.hf_settings import decoder_config, default_head_dim


def read_config(hf: HfSettings) -> TransformerConfig:
    """Attention has biases on all projections or on none."""
    settings = hf.model
    settings.require("rope_interleaved", (False,))
    config = decoder_config(
        hf,
        num_kv_heads=settings.integer("num_key_value_heads", settings.integer("num_attention_heads")),
        head_dim=default_head_dim(settings),
        max_positions=settings.integer("max_position_embeddings", 2048),
    )
    bias = settings.flag("attention_bias")
    return replace(config, attention_bias=bias, output_bias=bias, mlp_bias=settings.flag("mlp_bias"))


FAMILY = Family(DecoderModel, read_config)
