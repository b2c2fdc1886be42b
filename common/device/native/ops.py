"""The op table of the CPU with native kernels; torch's ops (`CpuOps`) compute what the kernels do not support.

Guarantees beyond `common.device.ops.Ops`: the bits of a row's result depend neither on the rest of the batch, nor on
the number of threads, nor on how a prompt is divided into chunks. (Exception: a chunk of one token is summed in another
order than longer chunks, so its last bits may differ.)
"""

from collections.abc import Sequence
from ctypes import CDLL
from pathlib import Path

import torch
from torch import Tensor

from kvferry.common.device.cpu_ops import CpuOps
from kvferry.common.device.native.layers import NativeLayers, can_fuse
from kvferry.common.device.native.library import NativeBatch
from kvferry.common.device.native.linear import DTYPES, HEAD_MULTIPLE, NativeLinear
from kvferry.common.device.native.panels import pack, pack_quantized, packed_bytes, view_packed
from kvferry.common.device.ops import AttentionMetadata, FusedLayers, GatedLayer, LayerShape, Linear, PackedForm
from kvferry.common.device.quantize import WeightScheme, quantize


class NativeOps(CpuOps):
    """For the layout [num_blocks, kv_heads, block_size, head_dim], float32 or bfloat16."""

    def __init__(self, library: CDLL) -> None:
        super().__init__()
        self.library = library
        self.packing = f"native-{Path(library._name).parent.name}"
        self._batch: NativeBatch | None = None

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, scheme: WeightScheme | None = None) -> Linear:
        """Pack a [out, in] weight once; the caller may free the original."""
        if weight.dtype not in DTYPES or not weight.numel():
            return super().pack_linear(weight, bias, scheme)
        library = self.library
        panels = pack(library, weight) if scheme is None else pack_quantized(library, quantize(weight, scheme))
        return NativeLinear(library, weight.dtype, panels, bias)

    def packed_form(self) -> PackedForm | None:
        return self

    def packed_bytes(self, out: int, inputs: int, dtype: torch.dtype) -> int | None:
        """Size of a packed [out, inputs] weight; None for other dtypes and empty weights."""
        if dtype not in DTYPES or not out * inputs:
            return None
        return packed_bytes(self.library, out, inputs, dtype)

    def pack_linear_into(self, memory: Tensor, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return NativeLinear(self.library, weight.dtype, pack(self.library, weight, memory), bias)

    def packed_linear(
        self, memory: Tensor, out: int, inputs: int, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Linear:
        return NativeLinear(self.library, dtype, view_packed(self.library, memory, out, inputs, dtype), bias)

    def packed_itemsize(self, dtype: torch.dtype) -> int:
        return dtype.itemsize if dtype in DTYPES else super().packed_itemsize(dtype)

    def fuse_layers(self, layers: Sequence[GatedLayer], shape: LayerShape) -> FusedLayers | None:
        """One native call for all layers, if all their parts are native."""
        return NativeLayers(self.library, layers, shape, self.batch_for) if can_fuse(layers, shape) else None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size] -> the same shape; statistics in float32."""
        if not _supports(x, weight):
            return super().rms_norm(x, weight, eps)
        source = x.contiguous()
        return self._norm(source, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum overwrites `residual`."""
        if not (_supports(x, residual, weight) and residual.is_contiguous()):
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(residual, x.contiguous(), weight, eps), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * F] -> silu(first half) * second half, [T, F]."""
        if not _supports(gate_up) or gate_up.dim() != 2:
            return super().silu_mul(gate_up)
        source = gate_up.contiguous()
        rows, size = source.shape[0], source.shape[1] // 2
        out = source.new_empty((rows, size))
        threads = torch.get_num_threads()
        self.library.kvf_silu_mul(_is_bf16(source), source.data_ptr(), rows, size, out.data_ptr(), threads)
        return out

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """query [T, H, D], key [T, K, D], cos and sin [T, D] float32; computed in float32."""
        if not (_supports(query, key) and cos.dtype == sin.dtype == torch.float32):
            return super().rotary(query, key, cos, sin)
        cos, sin = cos.contiguous(), sin.contiguous()
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def kv_write(self, key: Tensor, value: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata) -> None:
        """Write key and value [T, K, D] into the layer's cache at meta.slot_mapping."""
        pairs = zip(cache, (key, value), strict=True)
        if not all(_is_cache(tensor) and _supports(tensor, tokens) for tensor, tokens in pairs):
            super().kv_write(key, value, cache, meta)
            return
        batch, threads = self.batch_for(meta), torch.get_num_threads()
        for tensor, tokens in zip(cache, (key, value), strict=True):
            heads, size = tensor.shape[1], tensor.shape[3]
            source = _by_token(tokens.reshape(-1, heads, size))
            rows = source.shape[0]
            self.library.kvf_write_cache(
                _is_bf16(source), source.data_ptr(), source.stride(0), heads, batch.slots.data_ptr(),
                tensor.data_ptr(), tensor.shape[2], rows, size, threads,
            )  # fmt: skip

    def attention(
        self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float, window: int = 0
    ) -> Tensor:
        """Causal paged attention over each sequence's cache. query [T, H, D] -> [T, H * D]."""
        keys, values = cache
        rows, heads, size = query.shape
        fits = _is_cache(keys) and keys.shape == values.shape and values.is_contiguous() and keys.shape[3] == size
        if not (fits and _supports(query, keys, values) and size % HEAD_MULTIPLE == 0):
            return super().attention(query, cache, meta, scale, window)
        source, batch = _by_token(query), self.batch_for(meta)
        out = torch.empty((rows, heads * size), dtype=query.dtype)
        self.library.kvf_attention(
            _is_bf16(query), batch.reference, source.data_ptr(), source.stride(0), keys.data_ptr(),
            values.data_ptr(), heads, keys.shape[1], size, scale, window, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def batch_for(self, meta: AttentionMetadata) -> NativeBatch:
        """This step's arrays, made by its first layer. Threads whose steps alternate rebuild them: slower, not wrong.

        The caller must hold the result while a kernel reads it: another thread's step may replace self._batch.
        """
        batch = self._batch
        if batch is None or batch.meta is not meta:
            self._batch = batch = NativeBatch(meta)
        return batch

    def _norm(self, x: Tensor, add: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        size = x.shape[-1]
        self.library.kvf_rms_norm(
            _is_bf16(x), x.data_ptr(), None if add is None else add.data_ptr(), weight.data_ptr(), eps,
            x.numel() // max(size, 1), size, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, size = x.shape
        source = _by_token(x)
        out = torch.empty((rows, heads, size), dtype=x.dtype)
        self.library.kvf_rotate(
            _is_bf16(x), source.data_ptr(), source.stride(0), heads, out.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            rows, size, torch.get_num_threads(),
        )  # fmt: skip
        return out


def _is_bf16(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def _supports(first: Tensor, *others: Tensor) -> bool:
    return first.dtype in DTYPES and all(other.dtype == first.dtype for other in others)


def _is_cache(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous()


def _by_token(x: Tensor) -> Tensor:
    """[T, heads, D] with the heads of a token contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
