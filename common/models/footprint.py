"""Estimates a model's memory from its configuration and the shapes of its tensors. Reads no weight.

The estimate errs slightly on the high side: a node that would not fit is refused before it spends minutes loading or
is killed for lack of memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvferry.common.device.ops import Ops
from kvferry.common.device.quantize import WeightScheme, bits_per_weight
from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.weights import WeightSource

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_COMPUTE_BYTES = 4
"""Sums are float32 for every dtype of weights."""
_HIDDEN_COPIES = 8
"""Residual, its norm, the outputs of attention and MLP, and conversions between them."""
_LOGIT_COPIES = 3
"""The logits, and the sampler's scaled and sorted copies."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device."""

    weights: int
    loading: int
    """In addition to `weights`, while the largest tensor is converted and packed."""
    per_step_token: int
    per_sampled: int
    """Per sequence that samples a token in the step."""

    def computing(self, step_tokens: int, sequences: int) -> int:
        """Peak memory of a step of this size, in addition to weights and cache."""
        return self.per_step_token * step_tokens + self.per_sampled * sequences


def footprint(
    config: TransformerConfig,
    source: WeightSource,
    ops: Ops,
    dtype: torch.dtype,
    ranks: int = 1,
    scheme: WeightScheme | None = None,
) -> Footprint:
    """The footprint of one of `ranks` equal parts. `source` must be open."""
    packed = ops.packed_itemsize(dtype) if scheme is None else bits_per_weight(scheme) / 8
    sizes = {name: math.prod(source.shape(name)) for name in _used(config, source.names())}
    weights = sum(size * (dtype.itemsize if name == _EMBEDDING else packed) for name, size in sizes.items())
    if config.tie_word_embeddings and _EMBEDDING in sizes:
        # The embedding is kept unpacked for lookups and packed a second time as the head.
        weights += sizes[_EMBEDDING] * packed
    largest = max(sizes.values(), default=0)
    return Footprint(
        weights=int(weights // ranks),
        # As read (in the checkpoint's dtype or dequantised), as converted for packing, and the copies of quantising.
        loading=largest * (_COMPUTE_BYTES + dtype.itemsize + (0 if scheme is None else 2 * _COMPUTE_BYTES)) // ranks,
        per_step_token=_values_per_token(config) * _COMPUTE_BYTES,
        per_sampled=config.vocab_size * _COMPUTE_BYTES * _LOGIT_COPIES,
    )


def _used(config: TransformerConfig, names: Iterable[str]) -> Iterable[str]:
    extra = tuple(f"model.layers.{config.num_layers + index}." for index in range(config.extra_layers))
    return (
        name for name in names
        if not name.startswith(extra) and not (name == _HEAD and config.tie_word_embeddings)
    )  # fmt: skip


def _values_per_token(config: TransformerConfig) -> int:
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = heads * config.head_dim
    if config.mla is not None:
        attention = config.num_heads * (config.head_dim + config.mla.kv_lora_rank + config.mla.v_head_dim)
    inner = config.intermediate_size
    if config.moe is not None:
        inner = max(inner, config.moe.intermediate_size * config.moe.experts_per_token)
    return _HIDDEN_COPIES * config.hidden_size + 2 * attention + 3 * inner
