"""The op table: every operation of a model step that a device implements, as types. Names no device, computes nothing.

`Ops` is implemented by `cpu_ops`, `native.ops`, `torch_ops` and `npu_ops`; models call nothing else on a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvferry.common.device.quantize import WeightScheme

Linear = Callable[[Tensor], Tensor]
"""x [tokens, in_features] -> [tokens, out_features]. Holds its weight, packed for the device."""

PerHead = Callable[[Tensor], Tensor]
"""x [tokens, heads, in_features] -> [tokens, heads, out_features]. Holds one weight for each head."""

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [tokens, hidden], chosen experts [tokens, k] int64, their weights [tokens, k] float32 -> [tokens, hidden]."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A ragged batch: sequences concatenated along the token axis. T tokens, N sequences."""

    query_start_loc: tuple[int, ...]
    """N + 1 offsets into the token axis."""
    seq_lens: tuple[int, ...]
    """N lengths: cached positions plus this step's tokens. Upper bounds while a step is being recorded."""
    block_tables: Tensor
    """[N, max_blocks] int32, padded with 0."""
    slot_mapping: Tensor
    """[T] int64: block * block_size + offset of each of this step's tokens."""
    block_size: int
    lengths: Tensor
    """[N] int64: the lengths in memory that kernels can read."""

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True)
class GatedLayer:
    """The parts of a layer with grouped-head attention and a gated MLP, each preceded by a norm."""

    input_norm: Tensor
    qkv: Linear
    """[T, hidden] -> [T, (H + 2 * K) * D]."""
    head_norms: tuple[Tensor, Tensor] | None
    """Query and key norm, [D] each; None: queries and keys are not normalised."""
    window: int
    """As in `Ops.attention`."""
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes that all layers of a model have in common."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    """Epsilon of every norm."""
    scale: float
    """Factor of the attention scores."""


class FusedLayers(Protocol):
    """All layers of a model in as few calls as the device allows."""

    def __call__(
        self,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        meta: AttentionMetadata,
        caches: Sequence[tuple[Tensor, ...]],
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """Return the tensor that the caller must still add to `residual` [T, hidden], which is changed in place.

        cos and sin: [T, D] float32. `on_layer` is called after each layer with the number of layers done.
        """
        ...


class PackedForm(Protocol):
    """Ops whose packed weights are plain bytes, so that a file can hold them and several processes can map it."""

    packing: str
    """Identifies the packed layout: equal exactly when the bytes are."""

    def packed_bytes(self, out: int, inputs: int, dtype: torch.dtype) -> int | None:
        """Size of a packed [out, inputs] weight; None if this dtype or shape is not packed this way."""
        ...

    def pack_linear_into(self, memory: Tensor, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """As `Ops.pack_linear`, into `memory` of `packed_bytes` bytes."""
        ...

    def packed_linear(
        self, memory: Tensor, out: int, inputs: int, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Linear:
        """A linear over `memory` that an earlier `pack_linear_into` filled."""
        ...


class Ops(Protocol):
    """The fused operations of a model step. Shapes: T tokens, H query heads, K kv heads, D head size."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, scheme: WeightScheme | None = None) -> Linear:
        """Pack a [out, in] weight once for this device's fastest matmul; `scheme` quantises it first.

        Raises ConfigError if the device does not offer that scheme.
        """
        ...

    def packed_form(self) -> PackedForm | None:
        """None if packed weights cannot be stored as bytes."""
        ...

    def packed_itemsize(self, dtype: torch.dtype) -> int:
        """Bytes per weight value after packing."""
        ...

    def pack_per_head(self, weight: Tensor) -> PerHead:
        """Pack a [heads, in, out] weight."""
        ...

    def pack_experts(
        self, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], scheme: WeightScheme | None = None
    ) -> Experts:
        """Pack E gated MLPs: gate_ups [2 * F, hidden] (gate rows first), downs [hidden, F], E of each.

        The result computes the weighted sum of each token's chosen experts.
        """
        ...

    def fuse_layers(self, layers: Sequence[GatedLayer], shape: LayerShape) -> FusedLayers | None:
        """All layers as one callable; None if these ops gain nothing by it."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size], weight [size] -> the same shape."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may reuse the memory of `residual`."""
        ...

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Half-split rotary embedding. query [T, H, D], key [T, K, D], cos and sin [T, D] float32."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * F] -> silu(first half) * second half, [T, F]."""
        ...

    def kv_write(self, key: Tensor, value: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata) -> None:
        """Write key and value [T, K, D] into the layer's cache at meta.slot_mapping."""
        ...

    def attention(
        self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float, window: int = 0
    ) -> Tensor:
        """Causal paged attention over each sequence's cache. query [T, H, D] -> [T, H * D].

        `window` > 0: each token sees that many newest positions, its own included; blocks that lie entirely before
        the window are not read.
        """
        ...

    def latent_write(
        self, latent: Tensor, rope_key: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata
    ) -> None:
        """Write latent [T, R] and rope_key [T, P] into the layer's latent cache at meta.slot_mapping."""
        ...

    def latent_attention(
        self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float
    ) -> Tensor:
        """Causal paged attention of all heads over one key per position: its latent and its rotary key concatenated.

        The values are the latents. query [T, H, R + P] -> [T, H, R].
        """
        ...
