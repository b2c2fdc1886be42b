"""Takes weights by HuggingFace name and prepares them for the device: sliced, converted, merged, packed.

With tensor parallelism a rank reads only its part, as far as the checkpoint's format allows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvferry.common.device.base import Device
from kvferry.common.device.ops import Linear
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.models.weights import Part, TrackedWeights
from kvferry.common.parallel.collectives import ALONE, Collectives


class WeightLoader:
    """Loads one checkpoint's weights onto one device in one dtype; `scheme` quantises the large matrices."""

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
        # Errors of the head go directly into the logits: its weights have 8 bits, and its input is not rounded.
        return self.scheme and "int8"

    def tensor(self, name: str, *shape: int, split: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of this shape on the device, in `dtype` or else the model's dtype.

        `split`: the axis along which this rank takes its part; None: the whole tensor.
        """
        part = None
        if split is not None and not self.shard.is_whole:
            part = Part(split, *self.shard.span(shape[split]))
        return self.weights.take(name, shape, part).to(self.device.torch_device, dtype or self.dtype)

    def linear(self, outputs: dict[str, int], inputs: int, has_bias: bool, *, split: bool = False) -> Linear:
        """One packed linear from projections (name -> rows) with the same input, stacked along the rows.

        `split`: this rank takes its part of each projection's outputs.
        """
        names = [f"{name}.weight" for name in outputs]
        rows = sum(self._span(rows) if split else rows for rows in outputs.values())
        bias = self._biases(outputs, split) if has_bias else None
        return self.packed(names, (rows, inputs), lambda: self._weights(outputs, inputs, split), bias, self.scheme)

    def stacked(
        self, outputs: dict[str, int], inputs: int, has_bias: bool, *, split: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As `linear`, but returns weight and bias without packing them."""
        return self._weights(outputs, inputs, split), self._biases(outputs, split) if has_bias else None

    def partial_linear(self, name: str, rows: int, inputs: int, has_bias: bool) -> Linear:
        """A packed linear over this rank's part of the inputs; the sum over all ranks is the full result."""
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
        """A packed weight of shape (out, in). `read` loads it from the tensors `names`.

        If the store already holds it packed, from an earlier load of this or another process, `read` is not called.
        With a scheme the store is not used.
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
        """`part` followed by the sum over all ranks."""
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
        """Size of this rank's part of `total`."""
        start, end = self.shard.span(total)
        return end - start

    def vocabulary(self, name: str, vocab_size: int, columns: int) -> Tensor:
        """This rank's rows of a [vocab, columns] tensor, zero-padded to the same number on all ranks."""
        rows = self.tensor(name, vocab_size, columns, split=0)
        each = -(-vocab_size // self.shard.size)
        if len(rows) == each:
            return rows
        return torch.cat((rows, rows.new_zeros(each - len(rows), columns)))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first axis; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
