"""Experts by one linear each: what every device can do, without a fused kernel. Knows no device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvferry.common.device.base import Linear


class LoopedExperts:
    """Implements `common.device.base.Experts`: the tokens of each chosen expert together, one expert after the other.

    Sums are taken in float32, in the order of the experts: the same for a token whatever else is in the batch.
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
