"""What the engine needs of a device, as types: memory, threads, streams, and one table of ops. No device is named here.

`cpu`, `cuda` and `npu` implement it in one file each; nothing else in the tree asks which one it is.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Store as Store  # type: ignore[attr-defined]  # it is, its stubs do not say so

from kvferry.common.device.graphs import Graphs
from kvferry.common.device.quantize import WeightScheme


@dataclass(frozen=True, slots=True)
class DeviceProbe:
    """What this machine offers of one device, found out without raising."""

    name: str
    """cpu, cuda or npu."""
    available: bool
    detail: str
    """What was found, or what is missing and how to get it; one line, fit for a user."""
    count: int = 0
    """Devices that this process can see."""


Linear = Callable[[Tensor], Tensor]
"""x [tokens, in_features] -> [tokens, out_features]; the weight is inside, packed for this device."""


PerHead = Callable[[Tensor], Tensor]
"""x [tokens, heads, in_features] -> [tokens, heads, out_features]; each head has a weight of its own inside."""

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [tokens, hidden], chosen experts [tokens, k] int64, their weights [tokens, k] float32 -> [tokens, hidden]."""


@dataclass(frozen=True, slots=True)
class KvTensorSpec:
    """One cache tensor of one layer, e.g. the keys of grouped heads."""

    name: str
    shape_per_token: tuple[int, ...]
    """(kv_heads, head_dim) for grouped heads."""
    dtype: torch.dtype
    shard_axis: int | None = 0
    """Axis of shape_per_token that tensor parallel splits; None: replicated."""

    def whole_shape(self, ranks: int) -> tuple[int, ...]:
        """The shape per token of all ranks' parts together, where this is one of them."""
        factors = (ranks if axis == self.shard_axis else 1 for axis in range(len(self.shape_per_token)))
        return tuple(size * factor for size, factor in zip(self.shape_per_token, factors, strict=True))


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A ragged batch: sequences laid end to end on the token axis. T tokens, N sequences."""

    query_start_loc: tuple[int, ...]
    """N + 1 offsets into the token axis."""
    seq_lens: tuple[int, ...]
    """N lengths, cached positions and this step's tokens together; upper bounds of them while a step is recorded."""
    block_tables: Tensor
    """[N, max_blocks] int32, padded with 0."""
    slot_mapping: Tensor
    """[T] int64: block * block_size + offset for each of this step's tokens."""
    block_size: int
    lengths: Tensor
    """[N] int64: the lengths where kernels can read them."""

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True)
class GatedLayer:
    """The parts of a layer of grouped-head attention and a gated MLP, each behind a norm."""

    input_norm: Tensor
    qkv: Linear
    """[T, hidden] -> [T, (H + 2 * K) * D]."""
    head_norms: tuple[Tensor, Tensor] | None
    """Of queries and keys, [D] each; None: they are not normalised."""
    window: int
    """As in `Ops.attention`."""
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the layers of a model share."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    """Of all norms."""
    scale: float
    """Of attention's scores."""


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
        """residual [T, hidden], changed in place -> what is still to be added to it; cos and sin [T, D] float32.

        `on_layer` is told after each layer how many have been done.
        """
        ...


class PackedForm(Protocol):
    """Ops whose packed weights are plain bytes that can be kept in a file and used by several processes."""

    packing: str
    """Names the way of packing: equal only where the bytes are."""

    def packed_bytes(self, out: int, inputs: int, dtype: torch.dtype) -> int | None:
        """Of a packed [out, inputs] weight; None for one that is not packed this way."""
        ...

    def pack_linear_into(self, memory: Tensor, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """As `Ops.pack_linear`, into these packed_bytes."""
        ...

    def packed_linear(
        self, memory: Tensor, out: int, inputs: int, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Linear:
        """Over what `pack_linear_into` once left in such memory."""
        ...


class Ops(Protocol):
    """The fused operations of a model step. Shapes: T tokens, H query heads, K kv heads, D head size."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, scheme: WeightScheme | None = None) -> Linear:
        """Pack a [out, in] weight once for this device's fastest matmul, in fewer bits if a scheme is named.

        ConfigError when the device does not offer that scheme.
        """
        ...

    def packed_form(self) -> PackedForm | None:
        """None where packed weights cannot be kept."""
        ...

    def packed_itemsize(self, dtype: torch.dtype) -> int:
        """Bytes that a value of a weight takes once it is packed."""
        ...

    def pack_per_head(self, weight: Tensor) -> PerHead:
        """Pack a [heads, in, out] weight."""
        ...

    def pack_experts(
        self, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], scheme: WeightScheme | None = None
    ) -> Experts:
        """Pack gated MLPs, E of each: gate_ups [2 * F, hidden] (gate rows first), downs [hidden, F].

        The result is the weighted sum of each token's chosen ones.
        """
        ...

    def fuse_layers(self, layers: Sequence[GatedLayer], shape: LayerShape) -> FusedLayers | None:
        """The layers as one; None where these ops have nothing better than one op after the other."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size], weight [size] -> the same shape."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may reuse the memory of `residual`."""
        ...

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Half-split rotary embedding. query [T, H, D], key [T, K, D], cos and sin [T, D], float32."""
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

        With a `window` each token sees that many newest positions, its own among them; blocks that lie wholly before
        them are not read.
        """
        ...

    def latent_write(
        self, latent: Tensor, rope_key: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata
    ) -> None:
        """Write latent [T, R] and rope_key [T, P] into the layer's cache of latents at meta.slot_mapping."""
        ...

    def latent_attention(
        self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float
    ) -> Tensor:
        """Causal paged attention of all heads over one key a position: its latent and its rotary key end to end.

        The values are the latents. query [T, H, R + P] -> [T, H, R].
        """
        ...


class Work(Protocol):
    """An operation between ranks that is under way."""

    def wait(self) -> bool:
        """Its result may be used by what the calling thread does next. RuntimeError when it failed."""
        ...


class Group(Protocol):
    """Ranks that compute one model together; torch.distributed's groups of every library are such."""

    def rank(self) -> int:
        """Which one this is."""
        ...

    def size(self) -> int:
        """How many there are."""
        ...

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """One tensor: it becomes the sum of all ranks' own."""
        ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work:
        """One input; outputs: one list of `size` tensors, which become the ranks' inputs."""
        ...


MakeGroup = Callable[[Store, int, int, timedelta], Group]
"""(where the ranks find one another, rank, size, how long anything may take) -> their group."""


class Device(Protocol):
    """One accelerator (or the CPU) as the engine sees it."""

    name: str
    """cpu, cuda or npu."""
    torch_device: torch.device

    @property
    def ops(self) -> Ops:
        """The operations of a model step, by this device's fastest means."""
        ...

    def group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Group:
        """Meet the other ranks of this node, each of which calls this; by the library that this device's ranks use.

        Waits for them. RuntimeError when they do not come within `timeout`.
        """
        ...

    def graphs(self) -> Graphs | None:
        """A new recorder of steps; None where steps cannot be recorded."""
        ...

    def activate_thread(self) -> None:
        """Bind the calling thread to this device. Every thread that touches it calls this first."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes; what this process keeps for later allocations counts as free."""
        ...

    def allocate_layer_cache(
        self, specs: tuple[KvTensorSpec, ...], num_blocks: int, block_size: int
    ) -> tuple[Tensor, ...]:
        """One layer's cache tensors in this device's physical layout, in the order of `specs`.

        Whatever the layout, the first axis is the block.
        """
        ...

    def read_blocks(self, cache: Tensor, block_ids: Tensor) -> Tensor:
        """[len(block_ids), block_size, *shape_per_token] from the physical layout: canonical order."""
        ...

    def write_tokens(self, cache: Tensor, slots: Tensor, tokens: Tensor) -> None:
        """Put tokens [n, *shape_per_token] at `slots` [n] (block * block_size + offset) of the physical layout."""
        ...

    def supported_block_size(self, wanted: int) -> int:
        """The nearest block size that this device's kernels take, not smaller than `wanted`."""
        ...

    def pinned_empty(self, num_bytes: int) -> Tensor:
        """A uint8 host buffer that copies to and from the device fast."""
        ...

    def synchronize(self) -> None:
        """Wait until all work given to this device by this thread is done."""
        ...

    def side_stream(self) -> AbstractContextManager[None]:
        """Work that the calling thread gives inside runs beside the compute; on leaving it is done.

        It does not wait for work given before: what it reads must be complete, what it writes not in use.
        """
        ...
