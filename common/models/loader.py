"""Takes weights by HuggingFace name and makes them ready for the device: cut, converted, merged, packed.

Where a model is cut over ranks, a rank reads its part only, as far as the checkpoint's format lets it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.device.base import Device, Linear
from common.device.quantize import WeightScheme
from common.models.weights import Part, TrackedWeights
from common.parallel.collectives import ALONE, Collectives


class WeightLoader:
    """One checkpoint's weights on their way to one device, in one dtype; `scheme`: the large matrices in fewer bits."""

    def __init__(
        self,
        weights: TrackedWeights,
        device: Device,
        dtype: torch.dtype,
        collectives: Collectives = ALONE,
        scheme: WeightScheme | None = None,
    ) -> None:
        self.scheme = scheme
        self.weights = weights
        self.device = device
        self.ops = device.ops
        self.dtype = dtype
        self.collectives = collectives
        self.shard = collectives.shard

    @property
    def head_scheme(self) -> WeightScheme | None:
        """The head's errors go straight into the logits: its weights have 8 bits, and what it reads is not rounded."""
        return self.scheme and "int8"

    def tensor(self, name: str, *shape: int, split: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of this shape on the device, in the model's dtype unless another is asked for.

        `split`: the axis of which this rank has its part; None: all of it.
        """
        part = None
        if split is not None and not self.shard.is_whole:
            part = Part(split, *self.shard.span(shape[split]))
        return self.weights.take(name, shape, part).to(self.device.torch_device, dtype or self.dtype)

    def linear(self, outputs: dict[str, int], inputs: int, has_bias: bool, *, split: bool = False) -> Linear:
        """One packed linear out of projections (name to rows) that share their input, laid one below the other.

        `split`: of each projection's outputs this rank has its part.
        """
        return self.ops.pack_linear(*self.stacked(outputs, inputs, has_bias, split=split), self.scheme)

    def stacked(
        self, outputs: dict[str, int], inputs: int, has_bias: bool, *, split: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The weight and bias of `linear`, not packed."""
        axis = 0 if split else None
        weights = [self.tensor(f"{name}.weight", rows, inputs, split=axis) for name, rows in outputs.items()]
        biases = [self.tensor(f"{name}.bias", rows, split=axis) for name, rows in outputs.items()] if has_bias else []
        return joined(weights), joined(biases) if biases else None

    def partial_linear(self, name: str, rows: int, inputs: int, has_bias: bool) -> Linear:
        """A packed linear of this rank's part of the inputs. The sum of all ranks' results is the whole one's."""
        weight = self.tensor(f"{name}.weight", rows, inputs, split=1)
        bias = self.tensor(f"{name}.bias", rows) if has_bias else None
        return self.ops.pack_linear(weight, bias if self.shard.is_first else None, self.scheme)

    def summed(self, part: Linear) -> Linear:
        """`part` with the sum over all ranks behind it."""
        if self.shard.is_whole:
            return part
        collectives = self.collectives
        return lambda x: collectives.sum(part(x))

    def vocabulary(self, name: str, vocab_size: int, columns: int) -> Tensor:
        """This rank's rows of a [vocab, columns] tensor, filled up with zeros so that all ranks have as many."""
        rows = self.tensor(name, vocab_size, columns, split=0)
        each = -(-vocab_size // self.shard.size)
        if len(rows) == each:
            return rows
        return torch.cat((rows, rows.new_zeros(each - len(rows), columns)))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Along the first axis, without a copy where there is one part only."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
