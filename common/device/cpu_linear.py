"""Weights packed for the fastest matmul a CPU has. Private torch ops are used behind a probe, never trusted blindly.

oneDNN's packed layout is 1.3 to 3 times faster than `F.linear` for the small token counts of decoding. bfloat16 matmuls
need AVX-512 or AMX; without them torch takes a scalar path that is up to ten times slower than float32, so there the
weight is packed as float32 and only the activations are converted: the sums are the same float32 sums, the memory of
the weights is twice the checkpoint's.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.common.device.base import Linear, PerHead

_PROBE_SHAPE = (8, 32, 16)
_PROBE_TOLERANCE = 0.02


def native_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this machine with instructions made for it."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def pack(weight: Tensor, bias: Tensor | None) -> Linear:
    """The best of: packed in its own dtype, packed as float32, plain. weight [out, in], bias [out] or None.

    The returned callable takes x [tokens, in] of the weight's dtype and gives [tokens, out] of the same dtype.
    """
    if packing_works(weight.dtype):
        return _packed(weight, bias)
    if weight.dtype != torch.float32 and packing_works(torch.float32):
        return _widened(_packed(weight.float(), None if bias is None else bias.float()), weight.dtype)
    return _plain(weight, bias)


def packed_itemsize(dtype: torch.dtype) -> int:
    """Bytes that a value of a weight takes in what `pack` makes of it."""
    widened = not packing_works(dtype) and packing_works(torch.float32)
    return torch.float32.itemsize if widened else dtype.itemsize


def per_head(weight: Tensor) -> PerHead:
    """weight [heads, in, out]; multiplies in the weight's dtype, gives [tokens, heads, out] of the input's."""
    weight = weight.contiguous()
    return lambda x: torch.bmm(x.transpose(0, 1).to(weight.dtype), weight).transpose(0, 1).to(x.dtype)


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Packs a small matrix and compares with `F.linear`; False when the ops are missing, refuse, or are wrong."""
    rows, columns, tokens = _PROBE_SHAPE
    weight = torch.linspace(-1.0, 1.0, rows * columns).view(rows, columns).to(dtype)
    x = torch.linspace(1.0, -0.5, tokens * columns).view(tokens, columns).to(dtype)
    try:
        got = _packed(weight, None)(x)
    except (AttributeError, RuntimeError):
        return False
    wanted = functional.linear(x.float(), weight.float())
    return bool(torch.allclose(got.float(), wanted, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE))


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    multiply: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


def _widened(linear: Linear, dtype: torch.dtype) -> Linear:
    return lambda x: linear(x.float()).to(dtype)


def _plain(weight: Tensor, bias: Tensor | None) -> Linear:
    return lambda x: functional.linear(x, weight, bias)
