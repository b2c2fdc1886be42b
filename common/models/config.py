"""A model's configuration as the engine uses it, whatever kind of checkpoint it came from. Plain data.

Readers (`hf_config`, `gguf_config`) fill it and refuse, by name, what would change results and is not supported.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Literal

import orjson

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and how frequencies are stretched beyond the trained length."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """llama3 only, like the next."""
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    """llama3 and yarn: the length the model was trained at before it was stretched."""
    beta_fast: float = 32.0
    """yarn only, like the next two."""
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the forward pass and the sampler's defaults depend on."""

    architecture: str
    """As HuggingFace names the class: LlamaForCausalLM."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    """On q, k, v and the output projection."""
    mlp_bias: bool = False
    checkpoint_dtype: str = "float32"
    """What the weights are stored in; bfloat16 for GGUF, whatever its quantisation."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_top_k: int = 1000
    default_do_sample: bool = False

    def digest(self) -> str:
        """sha256 over what decides the logits: sampling defaults and ids of special tokens stay out."""
        fields = asdict(self)
        for name in ("eos_token_ids", "bos_token_id", "default_top_k", "default_do_sample"):
            del fields[name]
        return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()
