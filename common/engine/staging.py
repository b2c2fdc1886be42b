"""How a step's inputs reach the device and its results come back: through memory that copies are fast from.

A step's inputs lie in one area on the host, page-locked where that helps, and go over in one copy to an area of the
same layout on the device. On a CPU both are the same memory. Knows neither plans nor models.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvferry.common.device.base import Device

_ALIGNMENT = 512
"""Bytes; of each input, whatever kernels ask of the address of a tensor."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides where the inputs lie: equal shapes have them at equal places."""

    tokens: int
    """T."""
    sequences: int
    """N."""
    width: int
    """W: blocks of the longest table."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of the device's area, in its order."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    slots: Tensor
    """[T] int64."""
    lengths: Tensor
    """[N] int64."""
    sampled_rows: Tensor
    """[N] int64; the first n are used."""
    block_tables: Tensor
    """[N, W] int32."""


@dataclass(frozen=True, slots=True)
class HostInputs:
    """The same of the host's area, to be filled in."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sampled_rows: NDArray[np.int64]
    block_tables: NDArray[np.int32]


class Staging:
    """One area of each kind; they grow as steps do. What was sent is used until the next step is placed, no longer.

    Whoever places a step has waited for the one before: the host's area may still be read until then.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = self._there = torch.empty(0, dtype=torch.uint8)
        self._views: tuple[StepShape, HostInputs, StepInputs] | None = None
        """Of the shape that came last: steps that decode have the same for a while, and making them takes longer than
        filling them in."""

    def reserve(self, shapes: Iterable[StepShape]) -> None:
        """Make room for steps of these shapes: while there are no others, their inputs stay where they are."""
        self._grow(max(_num_bytes(shape) for shape in shapes))

    def place(self, shape: StepShape) -> HostInputs:
        """The host's side of a step; what is in it is of no meaning."""
        return self._views_of(shape)[1]

    def send(self, shape: StepShape) -> StepInputs:
        """The device's side of what was placed, in the order of the calling thread's work."""
        if self._there is not self._host:
            num_bytes = _num_bytes(shape)
            self._there[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        return self._views_of(shape)[2]

    def _views_of(self, shape: StepShape) -> tuple[StepShape, HostInputs, StepInputs]:
        if self._views is None or self._views[0] != shape:
            self._grow(_num_bytes(shape))
            host, there = _inputs(self._host, shape), _inputs(self._there, shape)
            arrays = (getattr(host, field.name).numpy() for field in fields(host))
            self._views = shape, HostInputs(*arrays), there
        return self._views

    def _grow(self, num_bytes: int) -> None:
        if num_bytes > len(self._host):
            self._host = self._device.pinned_empty(1 << (num_bytes - 1).bit_length())
            self._there = self._host.to(self._device.torch_device)


class Landing:
    """Where results come to on the host. It grows as they do."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same on the host, when all work given so far is done. Good until the next call.

        What is there already is given back as it is.
        """
        if all(tensor.is_cpu for tensor in tensors):
            return list(tensors)
        ends = _ends([tensor.nbytes for tensor in tensors])
        if ends[-1] > len(self._host):
            self._host = self._device.pinned_empty(1 << (ends[-1] - 1).bit_length())
        landed = []
        for tensor, start in zip(tensors, (0, *ends), strict=False):
            place = self._host[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            landed.append(place.copy_(tensor, non_blocking=True))
        self._device.synchronize()
        return landed


def _layout(shape: StepShape) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Of each of StepInputs."""
    tokens, sequences = (shape.tokens,), (shape.sequences,)
    wide = (torch.int64,)
    return (
        (tokens, *wide), (tokens, *wide), (tokens, *wide), (sequences, *wide), (sequences, *wide),
        ((shape.sequences, shape.width), torch.int32),
    )  # fmt: skip


def _num_bytes(shape: StepShape) -> int:
    return _ends([math.prod(size) * dtype.itemsize for size, dtype in _layout(shape)])[-1]


def _inputs(area: Tensor, shape: StepShape) -> StepInputs:
    views, start = [], 0
    for size, dtype in _layout(shape):
        num_bytes = math.prod(size) * dtype.itemsize
        views.append(area[start : start + num_bytes].view(dtype).view(size))
        start += _aligned(num_bytes)
    return StepInputs(*views)


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where each of them ends when they lie one behind the other, its end aligned."""
    ends, end = [], 0
    for size in sizes:
        end += _aligned(size)
        ends.append(end)
    return ends


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
