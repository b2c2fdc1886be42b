"""The op table of the CPU in plain torch: packed linears, and attention that reads whole blocks per kv head.

The only state is the layout of the current step, shared by all its layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.common.device import cpu_attention, cpu_linear
from kvferry.common.device.fallbacks import LoopedExperts, pack_quantized
from kvferry.common.device.ops import (
    AttentionMetadata,
    Experts,
    FusedLayers,
    GatedLayer,
    LayerShape,
    Linear,
    PackedForm,
    PerHead,
)
from kvferry.common.device.quantize import WeightScheme

_LATENT_SCORES = 1 << 12
"""Rows times heads of a latent prefill block. All heads read the same keys, so one matmul covers them."""


class CpuOps:
    """Implements `kvferry.common.device.ops.Ops` for the layouts of `CpuDevice`: [num_blocks, kv_heads, block_size,
    head_dim], and [num_blocks, block_size, size] for latents."""

    def __init__(self) -> None:
        self._step: _Step | None = None

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, scheme: WeightScheme | None = None) -> Linear:
        """Pack a [out, in] weight once; the caller may free the original."""
        return cpu_linear.pack(weight, bias) if scheme is None else pack_quantized(weight, bias, scheme)

    def packed_form(self) -> PackedForm | None:
        return None  # oneDNN's layout is opaque

    def packed_itemsize(self, dtype: torch.dtype) -> int:
        """float32's size if the CPU multiplies bfloat16 weights as float32."""
        return cpu_linear.packed_itemsize(dtype)

    def pack_per_head(self, weight: Tensor) -> PerHead:
        """weight [heads, in, out]; kept in the compute dtype."""
        return cpu_linear.per_head(weight.to(_compute_dtype(weight.dtype)))

    def pack_experts(
        self, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], scheme: WeightScheme | None = None
    ) -> Experts:
        gate_up, down = ([self.pack_linear(weight, None, scheme) for weight in half] for half in (gate_ups, downs))
        return LoopedExperts(gate_up, down, self.silu_mul)

    def fuse_layers(self, layers: Sequence[GatedLayer], shape: LayerShape) -> FusedLayers | None:
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size], weight [size] -> the same shape; statistics in float32."""
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum overwrites `residual`."""
        residual += x
        return functional.rms_norm(residual, (residual.shape[-1],), weight, eps), residual

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """query [T, H, D], key [T, K, D], cos and sin [T, D] float32; computed in float32."""
        cos, sin = cos[:, None], sin[:, None]
        heads = query.shape[1]
        joined = _joined(query, key)
        if joined is None:
            return _rotate(query, cos, sin), _rotate(key, cos, sin)
        rotated = _rotate(joined, cos, sin)
        return rotated[:, :heads], rotated[:, heads:]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * F] -> silu(first half) * second half, [T, F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def kv_write(self, key: Tensor, value: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata) -> None:
        """Write key and value [T, K, D] into the layer's cache at meta.slot_mapping."""
        rows = self._step_of(meta, cache[0].shape[1]).rows
        cpu_attention.write(rows, cache[0], key)
        cpu_attention.write(rows, cache[1], value)

    def attention(
        self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float, window: int = 0
    ) -> Tensor:
        """Causal paged attention over each sequence's cache. query [T, H, D] -> [T, H * D]."""
        dtype = _compute_dtype(cache[0].dtype)
        rows = cpu_attention.SDPA_ROWS if dtype == torch.float32 else cpu_attention.BMM_ROWS
        layout = self._step_of(meta, cache[0].shape[1]).layout(rows, window)
        return cpu_attention.attend(layout, query, cache, scale, dtype)

    def latent_write(
        self, latent: Tensor, rope_key: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata
    ) -> None:
        """Write latent [T, R] and rope_key [T, P] into the layer's cache of latents at meta.slot_mapping."""
        self.kv_write(latent, rope_key, (cache[0].unsqueeze(1), cache[1].unsqueeze(1)), meta)

    def latent_attention(
        self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float
    ) -> Tensor:
        """query [T, H, R + P] over latents and rotary keys -> [T, H, R]."""
        heads = query.shape[1]
        layout = self._step_of(meta, 1).layout(min(cpu_attention.BMM_ROWS, max(_LATENT_SCORES // heads, 1)), 0)
        as_heads = cache[0].unsqueeze(1), cache[1].unsqueeze(1)
        dtype = _compute_dtype(cache[0].dtype)
        return cpu_attention.attend(layout, query, as_heads, scale, dtype, latent=True).view(len(query), heads, -1)

    def _step_of(self, meta: AttentionMetadata, kv_heads: int) -> "_Step":
        # Made by the step's first layer. Two threads that alternate here rebuild it for each call: slower, not wrong.
        step = self._step
        if step is None or step.meta is not meta or step.kv_heads != kv_heads:
            self._step = step = _Step(meta, kv_heads)
        return step


class _Step:
    """The layout of one step: the rows its tokens are written to, and a `BatchLayout` per window."""

    def __init__(self, meta: AttentionMetadata, kv_heads: int) -> None:
        self.meta = meta
        self.kv_heads = kv_heads
        self.rows = cpu_attention.write_rows(meta, kv_heads)
        self._layouts: dict[tuple[int, int], cpu_attention.BatchLayout] = {}

    def layout(self, rows: int, window: int) -> cpu_attention.BatchLayout:
        """`rows`: maximum rows of a prefill block."""
        if (rows, window) not in self._layouts:
            self._layouts[rows, window] = cpu_attention.lay_out(self.meta, self.kv_heads, rows, window)
        return self._layouts[rows, window]


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """bfloat16 only if the CPU has instructions for it, else float32."""
    return dtype if dtype == torch.bfloat16 and cpu_linear.native_bfloat16() else torch.float32


def _joined(query: Tensor, key: Tensor) -> Tensor | None:
    """[T, H + K, D] if key directly follows query in one merged projection; halves the number of small ops."""
    tokens, heads, size = query.shape
    adjacent = (
        query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
        and key.storage_offset() == query.storage_offset() + heads * size
        and query.stride() == key.stride()
        and query.stride()[1:] == (size, 1)
    )
    if not adjacent:
        return None
    return query.as_strided((tokens, heads + key.shape[1], size), query.stride(), query.storage_offset())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, h, D], cos and sin [T, 1, D]: (a, b) -> (a cos - b sin, b cos + a sin) for the halves a and b."""
    half = x.shape[-1] // 2
    wide = x.float()
    out = wide * cos
    out[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(wide[..., :half], sin[..., half:])
    return out.to(x.dtype)
