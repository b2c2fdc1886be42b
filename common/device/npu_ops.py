"""The op table with Ascend's fused kernels. Does not import torch_npu: the module is passed in.

`tests/npu` checks names, keywords and shapes of every call against the real op schemas; the kernels' numbers and limits
can only be checked on an NPU (`ops/npu/smoke.py`). `TorchOps` computes what a kernel does not support: float32
attention, head sizes other than 128, sliding windows, latent attention, experts, chips of another generation, ops
missing from a release.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvferry.common.device.ops import AttentionMetadata
from kvferry.common.device.torch_ops import TorchOps

MASK_SIZE = 2048
"""Side of the compressed causal mask that the attention kernel takes for sequences of any length."""
_MAX_SEQUENCES = 4096
_HEAD_SIZE = 128
_MAX_HEADS_PER_KV_HEAD = 64
_ROTARY_MAX_HEADS = 1000
_ROTARY_MAX_HEAD_SIZE = 896


class TorchNpuOps(Protocol):
    """The part of torch_npu that is called, with torch_npu's parameter names."""

    def npu_rms_norm(self, input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """(y, reciprocal deviation)."""
        ...

    def npu_add_rms_norm(self, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        """(y, reciprocal deviation, x1 + x2); all of one dtype."""
        ...

    def npu_rotary_mul(self, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> Tensor:
        """input [1, T, heads, D], r1 (cos) and r2 (sin) [1, T, 1, D]."""
        ...

    def npu_swiglu(self, input: Tensor, dim: int) -> Tensor:
        """silu(first half) * second half along `dim`."""
        ...

    def _npu_reshape_and_cache(
        self, *, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
    ) -> None: ...

    def npu_scatter_pa_kv_cache(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *,
        cache_mode: str,
    ) -> None:  # fmt: skip
        """As `_npu_reshape_and_cache`, on newer chips; cache_mode Norm is the plain layout."""
        ...

    def npu_fused_infer_attention_score(
        self, query: Tensor, key: Tensor, value: Tensor, *, atten_mask: Tensor, actual_seq_lengths: list[int],
        actual_seq_lengths_kv: list[int], block_table: Tensor, num_heads: int, num_key_value_heads: int, scale: float,
        input_layout: str, sparse_mode: int, block_size: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(attention, log-sum-exp)."""
        ...


@dataclass(frozen=True, slots=True)
class NpuFeatures:
    """The kernels that this chip and this torch_npu support."""

    norms: bool
    rotary: bool
    swiglu: bool
    cache_write: Literal["reshape_and_cache", "scatter_pa", "torch"]
    attention: bool


def npu_features(chip: str, offered: Container[str]) -> NpuFeatures:
    """Derive the features from the chip's name (as torch_npu reports it) and the names of torch_npu's ops."""
    a2_or_a3 = chip.startswith(("Ascend910B", "Ascend910_93"))
    a5 = chip.startswith(("Ascend910_95", "Ascend950"))
    cache_write: Literal["reshape_and_cache", "scatter_pa", "torch"] = "torch"
    if a2_or_a3 and "_npu_reshape_and_cache" in offered:
        cache_write = "reshape_and_cache"
    elif a5 and "npu_scatter_pa_kv_cache" in offered:
        cache_write = "scatter_pa"
    return NpuFeatures(
        norms="npu_rms_norm" in offered and "npu_add_rms_norm" in offered,
        rotary="npu_rotary_mul" in offered,
        swiglu="npu_swiglu" in offered,
        cache_write=cache_write,
        attention=(a2_or_a3 or a5) and "npu_fused_infer_attention_score" in offered,
    )


def causal_mask(device: torch.device) -> Tensor:
    """[2048, 2048] int8, 1 above the diagonal: the masked positions."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8).triu(1).to(device)


class NpuOps(TorchOps):
    """Implements `kvferry.common.device.ops.Ops`. `mask`: `causal_mask` on the device, made once."""

    def __init__(self, torch_npu: TorchNpuOps, features: NpuFeatures, mask: Tensor) -> None:
        self._npu = torch_npu
        self._features = features
        self._mask = mask

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size] -> the same shape."""
        if not self._features.norms:
            return super().rms_norm(x, weight, eps)
        return self._npu.npu_rms_norm(x, weight, epsilon=eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        if not self._features.norms:
            return super().add_rms_norm(x, residual, weight, eps)
        normalised, _, total = self._npu.npu_add_rms_norm(x, residual, weight, epsilon=eps)
        return normalised, total

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Half-split rotary embedding; the kernel takes four axes and one dtype."""
        if not self._features.rotary or query.shape[1] >= _ROTARY_MAX_HEADS or query.shape[2] >= _ROTARY_MAX_HEAD_SIZE:
            return super().rotary(query, key, cos, sin)
        r1, r2 = (t.to(query.dtype)[None, :, None] for t in (cos, sin))
        rotated = (self._npu.npu_rotary_mul(x.unsqueeze(0), r1, r2, rotary_mode="half") for x in (query, key))
        return next(rotated).squeeze(0), next(rotated).squeeze(0)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * F] -> [T, F]."""
        if not self._features.swiglu:
            return super().silu_mul(gate_up)
        return self._npu.npu_swiglu(gate_up, dim=-1)

    def kv_write(self, key: Tensor, value: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata) -> None:
        """Both caches in one call. The kernels take contiguous tensors and 32-bit slots."""
        key, value, slots = key.contiguous(), value.contiguous(), meta.slot_mapping.to(torch.int32)
        if self._features.cache_write == "reshape_and_cache":
            self._npu._npu_reshape_and_cache(
                key=key, value=value, key_cache=cache[0], value_cache=cache[1], slot_indices=slots
            )
        elif self._features.cache_write == "scatter_pa":
            self._npu.npu_scatter_pa_kv_cache(key, value, cache[0], cache[1], slots, cache_mode="Norm")
        else:
            super().kv_write(key, value, cache, meta)

    def attention(
        self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float, window: int = 0
    ) -> Tensor:
        """One call for prefill chunks and decode tokens: query ends are cumulative, cache lengths are not."""
        if window or not self._kernel_supports(query, cache, meta):
            return super().attention(query, cache, meta, scale, window)
        _, heads, _ = query.shape
        num_blocks, block_size, kv_heads, _ = cache[0].shape
        attended, _ = self._npu.npu_fused_infer_attention_score(
            query.contiguous(), *(tensor.view(num_blocks, block_size, -1) for tensor in cache),
            atten_mask=self._mask, actual_seq_lengths=list(meta.query_start_loc[1:]),
            actual_seq_lengths_kv=list(meta.seq_lens), block_table=meta.block_tables, num_heads=heads,
            num_key_value_heads=kv_heads, scale=scale, input_layout="TND", sparse_mode=3, block_size=block_size,
        )  # fmt: skip
        return attended.flatten(1)

    def _kernel_supports(self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata) -> bool:
        return (
            self._features.attention
            and query.dtype in (torch.float16, torch.bfloat16)
            and query.shape[2] == _HEAD_SIZE
            and query.shape[1] <= _MAX_HEADS_PER_KV_HEAD * cache[0].shape[2]
            and meta.num_sequences <= _MAX_SEQUENCES
        )
