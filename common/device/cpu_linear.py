"""Weights packed for torch's fastest CPU matmul. Uses private torch ops, each behind a probe that checks its result.

oneDNN's packed layout is 1.3 to 3 times faster than `F.linear` for the small token counts of decoding. bfloat16 matmuls
need AVX-512 or AMX; without them torch takes a scalar path that is up to ten times slower than float32. There the
weight is packed as float32 and only the activations are converted: the sums are the same float32 sums, and the weights
take twice the checkpoint's memory.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.common.device.ops import Linear, PerHead

_PROBE_SHAPE = (8, 32, 16)
_PROBE_TOLERANCE = 0.02


def native_bfloat16() -> bool:
    """Whether oneDNN has bfloat16 instructions for matmuls on this machine."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def pack(weight: Tensor, bias: Tensor | None) -> Linear:
    """Pack weight [out, in] with bias [out]: in its own dtype, else as float32, else leave it plain.

    The result maps x [tokens, in] to [tokens, out], both in the weight's dtype.
    """
    if packing_works(weight.dtype):
        return _packed(weight, bias)
    if weight.dtype != torch.float32 and packing_works(torch.float32):
        return _widened(_packed(weight.float(), None if bias is None else bias.float()), weight.dtype)
    return _plain(weight, bias)


def packed_itemsize(dtype: torch.dtype) -> int:
    """Bytes per weight value after `pack`."""
    widened = not packing_works(dtype) and packing_works(torch.float32)
    return torch.float32.itemsize if widened else dtype.itemsize


def per_head(weight: Tensor) -> PerHead:
    """weight [heads, in, out]; multiplies in the weight's dtype, returns [tokens, heads, out] in the input's."""
    weight = weight.contiguous()
    return lambda x: torch.bmm(x.transpose(0, 1).to(weight.dtype), weight).transpose(0, 1).to(x.dtype)


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Pack a small matrix and compare with `F.linear`; False if the ops are missing, fail, or return wrong values."""
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
