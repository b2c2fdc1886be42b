"""A model's configuration as the engine uses it, independent of the checkpoint's format. Plain data.

The readers (each family's `read_config`, `gguf_config`) fill it and refuse, by name, every setting that would change
results and is not supported.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

import orjson

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.parallel.shard import Shard

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency, and scaling beyond the trained length."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """llama3 only, as high_freq_factor."""
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    """llama3 and yarn: the trained length before scaling."""
    beta_fast: float = 32.0
    """yarn only, as beta_slow and attention_factor."""
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin."""
    mscale_all_dim: float = 0.0
    """DeepSeek's yarn: multiplies the attention scale by (0.1 * mscale_all_dim * ln(factor) + 1) squared."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts: layers whose MLP consists of many small experts, a few chosen for each token."""

    layers: tuple[int, ...]
    """Indices of the layers with experts; other layers have one MLP of `TransformerConfig.intermediate_size`."""
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of each expert."""
    shared_intermediate_size: int = 0
    """Of the shared MLP, which every token passes in addition to its experts; 0: none."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_score_bias: bool = False
    """A learned bias per expert that affects which experts are chosen, not their weights."""
    num_groups: int = 1
    """Experts form so many groups of consecutive experts; each token chooses from the best `groups_kept` groups."""
    groups_kept: int = 1
    group_score_experts: int = 1
    """A group's score is the sum of so many of its best experts' scores."""
    normalise: bool = False
    """Divide the weights of a token's experts by their sum."""
    scaling: float = 1.0
    """Multiplies the weights."""
    float32_router: bool = False
    """Compute scores in float32 regardless of the model's dtype."""


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention: caches one latent and one rotary key per token, shared by all heads.

    Queries and keys have head size `nope_head_dim + rope_head_dim`.
    """

    q_lora_rank: int | None
    """Size that queries are compressed to before they are expanded per head; None: not compressed."""
    kv_lora_rank: int
    """Size of the latent."""
    nope_head_dim: int
    """Size of the part of a head that is not rotated; derived from the latent."""
    rope_head_dim: int
    v_head_dim: int
    interleaved: bool
    """The checkpoint's rotary pairs are adjacent rows, not halves."""


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Everything that the forward pass and the sampling defaults depend on."""

    architecture: str
    """HuggingFace's class name, e.g. LlamaForCausalLM."""
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
    """On q, k and v; with latent attention, on the compressing projections."""
    output_bias: bool = False
    """On the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Normalise each head's query and key before rotation."""
    windows: tuple[int, ...] = ()
    """Per layer: the number of newest positions visible to a token, its own included; 0: all. Empty: 0 everywhere."""
    extra_layers: int = 0
    """Additional layers after the last, which a checkpoint may contain and the next token does not depend on."""
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    checkpoint_dtype: str = "float32"
    """Dtype of the stored weights; bfloat16 for GGUF with any quantisation."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_top_k: int = 1000
    default_do_sample: bool = False

    @property
    def rotated_size(self) -> int:
        """Size of the rotated part of a head."""
        return self.mla.rope_head_dim if self.mla else self.head_dim

    def window(self, layer: int) -> int:
        """Number of newest positions visible to a token in this layer; 0: all."""
        return self.windows[layer] if self.windows else 0

    def digest(self) -> str:
        """sha256 over everything that determines the logits; excludes sampling defaults and special token ids."""
        fields = asdict(self)
        for name in ("eos_token_ids", "bos_token_id", "default_top_k", "default_do_sample"):
            del fields[name]
        return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def of_rank(self, shard: Shard) -> "TransformerConfig":
        """The configuration with one rank's number of heads; all other values are the whole model's."""
        return replace(self, num_heads=self.num_heads // shard.size, num_kv_heads=self.num_kv_heads // shard.size)

    def check_divisible(self, shard: Shard) -> None:
        """Raises ModelLoadError with the name of a size that does not divide by the number of ranks."""
        for name, value in self._sharded_sizes():
            if value % shard.size:
                raise ModelLoadError(
                    f"node.tensor_parallel = {shard.size}: the model's {name} is {value}, which is not divisible by "
                    f"{shard.size}; choose a number of ranks that divides it"
                )

    def _sharded_sizes(self) -> Iterator[tuple[str, int]]:
        """The sizes that are divided over ranks, with their names in config.json."""
        yield "num_attention_heads", self.num_heads
        if self.mla is None:
            yield "num_key_value_heads", self.num_kv_heads
        if self.moe is None or len(self.moe.layers) < self.num_layers:
            yield "intermediate_size", self.intermediate_size
        if self.moe is not None:
            yield "moe_intermediate_size", self.moe.intermediate_size
            if self.moe.shared_intermediate_size:
                yield "shared experts' size", self.moe.shared_intermediate_size
