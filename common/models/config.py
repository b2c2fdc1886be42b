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
    mscale_all_dim: float = 0.0
    """yarn of DeepSeek: attention's scale is multiplied by (0.1 * this * ln(factor) + 1) squared."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Layers whose MLP is many small experts, a few of which are chosen for each token."""

    layers: tuple[int, ...]
    """Indices of the layers that have experts; the others have one MLP of `intermediate_size`."""
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of each expert."""
    shared_intermediate_size: int = 0
    """Of the MLP beside the experts that every token takes; 0: there is none."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_score_bias: bool = False
    """A learned number for each expert that counts when experts are chosen, not when they are weighed."""
    num_groups: int = 1
    """Experts are chosen from the best `groups_kept` of so many groups of neighbours."""
    groups_kept: int = 1
    group_score_experts: int = 1
    """A group is as good as the sum of its so many best experts."""
    normalise: bool = False
    """Weights of a token's experts are divided by their sum."""
    scaling: float = 1.0
    """Multiplies the weights."""
    float32_router: bool = False
    """Scores are computed in float32 whatever the model's dtype."""


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention: one compressed latent and one rotary key a token, shared by all heads, are cached.

    A head's size is `nope_head_dim + rope_head_dim` for queries and keys.
    """

    q_lora_rank: int | None
    """Size that queries are compressed to before they are spread over the heads; None: they are not."""
    kv_lora_rank: int
    """Size of the latent."""
    nope_head_dim: int
    """The part of a head that is not rotated; comes from the latent."""
    rope_head_dim: int
    v_head_dim: int
    interleaved: bool
    """The checkpoint's rotary pairs are neighbours, not halves."""


@dataclass(frozen=True, slots=True)
class TransformerConfig:
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
    """On q, k and v; on the compressing projections of latent attention."""
    output_bias: bool = False
    """On attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each head's query and key is normalised before it is rotated."""
    windows: tuple[int, ...] = ()
    """For each layer, how many of the newest positions a token sees, its own among them; 0: all. Empty: all in all."""
    extra_layers: int = 0
    """Layers behind the last that a checkpoint may carry and that the next token does not depend on."""
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    checkpoint_dtype: str = "float32"
    """What the weights are stored in; bfloat16 for GGUF, whatever its quantisation."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_top_k: int = 1000
    default_do_sample: bool = False

    @property
    def rotated_size(self) -> int:
        """How much of a head the rotary embedding turns."""
        return self.mla.rope_head_dim if self.mla else self.head_dim

    def window(self, layer: int) -> int:
        """How many of the newest positions a token sees in this layer; 0: all."""
        return self.windows[layer] if self.windows else 0

    def digest(self) -> str:
        """sha256 over what decides the logits: sampling defaults and ids of special tokens stay out."""
        fields = asdict(self)
        for name in ("eos_token_ids", "bos_token_id", "default_top_k", "default_do_sample"):
            del fields[name]
        return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()
