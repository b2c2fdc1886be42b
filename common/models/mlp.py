"""The gated MLP: silu(gate) * up, then down. Gate and up are one merged projection."""

from collections.abc import Callable

from torch import Tensor

from kvferry.common.device.ops import Linear, Ops
from kvferry.common.models.loader import WeightLoader

Mlp = Callable[[Tensor], Tensor]
"""Normalised hidden [T, hidden] -> [T, hidden]."""


class GatedMlp:
    """Implements Mlp."""

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear) -> None:
        self._ops = ops
        self.gate_up = gate_up
        self.down = down

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self._ops.silu_mul(self.gate_up(hidden)))


def load_mlp(prefix: str, hidden_size: int, intermediate_size: int, has_bias: bool, loader: WeightLoader) -> GatedMlp:
    """Load the MLP whose tensor names start with `prefix`: this rank's part, followed by the sum over all ranks."""
    part = load_partial_mlp(prefix, hidden_size, intermediate_size, has_bias, loader)
    return GatedMlp(loader.ops, part.gate_up, loader.summed(part.down))


def load_partial_mlp(
    prefix: str, hidden_size: int, intermediate_size: int, has_bias: bool, loader: WeightLoader
) -> GatedMlp:
    """Load this rank's part of an MLP; the sum over all ranks is the full result."""
    merged = {prefix + "gate_proj": intermediate_size, prefix + "up_proj": intermediate_size}
    return GatedMlp(
        loader.ops,
        loader.linear(merged, hidden_size, has_bias, split=True),
        loader.partial_linear(prefix + "down_proj", hidden_size, intermediate_size, has_bias),
    )
