"""What all layers share in one step of a model."""

from dataclasses import dataclass

from torch import Tensor

from kvferry.common.device.base import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ModelStep:
    """T tokens of a ragged batch."""

    cos: Tensor
    """[T, rotated size] float32, like `sin`."""
    sin: Tensor
    meta: AttentionMetadata
