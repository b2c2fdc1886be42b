"""Takes weights by HuggingFace name and makes them ready for the device: cut, converted, merged, packed.

Where a model is cut over ranks, a rank reads its part only, as far as the checkpoint's format lets it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvferry.common.device.base import Device, Linear
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.models.weights import Part, TrackedWeights
from kvferry.common.parallel.collectives import ALONE, Collectives


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
        names = [f"{name}.weight" for name in outputs]
        rows = sum(self._span(rows) if split else rows for rows in outputs.values())
        bias = self._biases(outputs, split) if has_bias else None
        return self.packed(names, (rows, inputs), lambda: self._weights(outputs, inputs, split), bias, self.scheme)

    def stacked(
        self, outputs: dict[str, int], inputs: int, has_bias: bool, *, split: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The weight and bias of `linear`, not packed."""
        return self._weights(outputs, inputs, split), self._biases(outputs, split) if has_bias else None

    def partial_linear(self, name: str, rows: int, inputs: int, has_bias: bool) -> Linear:
        """A packed linear of this rank's part of the inputs. The sum of all ranks' results is the whole one's."""
        weight = f"{name}.weight"
        bias = self.tensor(f"{name}.bias", rows) if has_bias else None
        return self.packed(
            [weight], (rows, self._span(inputs)), lambda: self.tensor(weight, rows, inputs, split=1),
            bias if self.shard.is_first else None, self.scheme,
        )  # fmt: skip

    def packed(
        self,
        names: Sequence[str],
        shape: tuple[int, int],
        read: Callable[[], Tensor],
        bias: Tensor | None = None,
        scheme: WeightScheme | None = None,
    ) -> Linear:
        """A weight of this shape (out, in), which `read` takes and which consists of `names`, packed.

        Where an earlier load, of this or another process, left it packed, nothing is read. With a scheme none does.
        """
        form, store = self.ops.packed_form(), self.weights.packed
        size = None if form is None or scheme is not None else form.packed_bytes(*shape, self.dtype)
        if form is None or store is None or size is None:
            return self.ops.pack_linear(read(), bias, scheme)
        memory, is_filled = store.take("+".join(names), size)
        if not is_filled:
            return form.pack_linear_into(memory, read(), bias)
        for name in names:
            self.weights.take_packed(name)
        return form.packed_linear(memory, *shape, self.dtype, bias)

    def summed(self, part: Linear) -> Linear:
        """`part` with the sum over all ranks behind it."""
        if self.shard.is_whole:
            return part
        collectives = self.collectives
        return lambda x: collectives.all_reduce(part(x))

    def _weights(self, outputs: dict[str, int], inputs: int, split: bool) -> Tensor:
        axis = 0 if split else None
        return joined([self.tensor(f"{name}.weight", rows, inputs, split=axis) for name, rows in outputs.items()])

    def _biases(self, outputs: dict[str, int], split: bool) -> Tensor:
        axis = 0 if split else None
        return joined([self.tensor(f"{name}.bias", rows, split=axis) for name, rows in outputs.items()])

    def _span(self, total: int) -> int:
        """How much of `total` this rank has."""
        start, end = self.shard.span(total)
        return end - start

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
