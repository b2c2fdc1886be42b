"""Takes weights by HuggingFace name and makes them ready for the device: converted, merged, packed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.device.base import Device, Linear
from common.models.weights import TrackedWeights


class WeightLoader:
    """One checkpoint's weights on their way to one device, in one dtype."""

    def __init__(self, weights: TrackedWeights, device: Device, dtype: torch.dtype) -> None:
        self.weights = weights
        self.device = device
        self.ops = device.ops
        self.dtype = dtype

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of this shape on the device, in the model's dtype unless another is asked for."""
        return self.weights.take(name, shape).to(self.device.torch_device, dtype or self.dtype)

    def linear(self, outputs: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        """One packed linear out of projections (name to rows) that share their input, laid one below the other."""
        return self.ops.pack_linear(*self.stacked(outputs, inputs, has_bias))

    def stacked(self, outputs: dict[str, int], inputs: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        """The weight and bias of `linear`, not packed."""
        weights = [self.tensor(f"{name}.weight", rows, inputs) for name, rows in outputs.items()]
        biases = [self.tensor(f"{name}.bias", rows) for name, rows in outputs.items()] if has_bias else []
        return joined(weights), joined(biases) if biases else None


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Along the first axis, without a copy where there is one part only."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
