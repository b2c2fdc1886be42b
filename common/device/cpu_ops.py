"""The ops of a model step on a CPU: packed linears, and attention that reads whole blocks per kv head.

Holds no state but the layout of the step at hand, which every layer of that step shares.
"""

import torch
from torch import Tensor
from torch.nn import functional

from common.device import cpu_attention, cpu_linear
from common.device.base import AttentionMetadata, Linear


class CpuOps:
    """Implements `common.device.base.Ops` for the layout [num_blocks, kv_heads, block_size, head_dim]."""

    def __init__(self) -> None:
        self._plan: cpu_attention.AttentionPlan | None = None

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack a [out, in] weight once; the caller may drop the original."""
        return cpu_linear.pack(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, hidden] -> the same shape; statistics in float32."""
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum takes the memory of `residual`."""
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
        plan = self._plan_for(meta, cache[0])
        cpu_attention.write(plan, cache[0], key)
        cpu_attention.write(plan, cache[1], value)

    def attention(self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float) -> Tensor:
        """Causal paged attention over each sequence's cache. query [T, H, D] -> [T, H * D]."""
        plan = self._plan_for(meta, cache[0])
        return cpu_attention.attend(plan, query, cache, scale, _compute_dtype(cache[0].dtype))

    def _plan_for(self, meta: AttentionMetadata, cache: Tensor) -> cpu_attention.AttentionPlan:
        """The plan of this step, made by its first layer. Two threads at once only lose the sharing."""
        plan = self._plan
        if plan is None or plan.meta is not meta:
            wide_rows = _compute_dtype(cache.dtype) == torch.float32
            plan = cpu_attention.make_plan(meta, cache.shape[1], wide_rows)
            self._plan = plan
        return plan


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Matmuls in bfloat16 only where the CPU has instructions for it."""
    return dtype if dtype == torch.bfloat16 and cpu_linear.native_bfloat16() else torch.float32


def _joined(query: Tensor, key: Tensor) -> Tensor | None:
    """[T, H + K, D] when key lies right behind query in one merged projection; halves the number of small ops."""
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
