"""Quantised linears by torch's own ops, on any device: the weights are widened at each call. Small in memory and slow;
for where there are no kernels for them, and to compare those with."""

from torch import Tensor
from torch.nn import functional

from kvferry.common.device.base import Linear
from kvferry.common.device.quantize import WeightScheme, quantize, quantize_rows


def pack(weight: Tensor, bias: Tensor | None, scheme: WeightScheme) -> Linear:
    """weight [out, in] -> a callable from x [tokens, in] to [tokens, out] of x's dtype; sums in float32."""
    kept, wide_bias = quantize(weight, scheme), None if bias is None else bias.float()

    def multiply(x: Tensor) -> Tensor:
        return functional.linear(x.float(), kept.dequantized(), wide_bias).to(x.dtype)

    def multiply_whole(x: Tensor) -> Tensor:
        groups, group_scales = quantize_rows(x.reshape(-1, x.shape[-1]))
        rows = (groups * group_scales[..., None]).flatten(1)[:, : x.shape[-1]]
        sums = rows @ kept.values.float().T * kept.scales.T
        out = sums if wide_bias is None else sums + wide_bias
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    return multiply_whole if kept.rows_too else multiply
