"""Building blocks for devices without kernels of their own, in plain torch: quantised linears and experts one by one.

Names no device. Slow but correct everywhere; the tests compare the native kernels with them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.common.device.ops import Linear
from kvferry.common.device.quantize import WeightScheme, quantize, quantize_rows


def pack_quantized(weight: Tensor, bias: Tensor | None, scheme: WeightScheme) -> Linear:
    """weight [out, in] -> a callable from x [tokens, in] to [tokens, out] of x's dtype; sums in float32.

    Keeps the quantised weight and widens it at each call: small in memory, slow.
    """
    kept, wide_bias = quantize(weight, scheme), None if bias is None else bias.float()

    def multiply(x: Tensor) -> Tensor:
        return functional.linear(x.float(), kept.dequantized(), wide_bias).to(x.dtype)

    def multiply_rounded(x: Tensor) -> Tensor:
        groups, group_scales = quantize_rows(x.reshape(-1, x.shape[-1]))
        rows = (groups * group_scales[..., None]).flatten(1)[:, : x.shape[-1]]
        sums = rows @ kept.values.float().T * kept.scales.T
        out = sums if wide_bias is None else sums + wide_bias
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    return multiply_rounded if kept.rounds_rows else multiply


class LoopedExperts:
    """Implements `kvferry.common.device.ops.Experts`: one expert after the other, each over all its tokens.

    Sums are taken in float32 in the order of the experts, so a token's result does not depend on the rest of the batch.
    """

    def __init__(
        self, gate_ups: Sequence[Linear], downs: Sequence[Linear], silu_mul: Callable[[Tensor], Tensor]
    ) -> None:
        self._pairs = tuple(zip(gate_ups, downs, strict=True))
        self._silu_mul = silu_mul

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], chosen [T, k] int64, weights [T, k] -> [T, hidden] of x's dtype."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        rows, ordered_weights = order // chosen.shape[1], weights.float().flatten()[order]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for pair, count in zip(self._pairs, flat.bincount(minlength=len(self._pairs)).tolist(), strict=True):
            if not count:
                continue
            gate_up, down = pair
            own = slice(start, start + count)
            computed = down(self._silu_mul(gate_up(x[rows[own]])))
            out.index_add_(0, rows[own], computed.float() * ordered_weights[own, None])
            start += count
        return out.to(x.dtype)
