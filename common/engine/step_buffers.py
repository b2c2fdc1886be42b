"""Pinned host buffers for a step's inputs and results. Knows neither schedulers nor models.

All inputs of a step lie in one host area, pinned if the device gains by it, and reach the device in one copy to an area
of the same layout. On a CPU both are the same memory.
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
"""Bytes; satisfies the address alignment that any kernel needs of an input tensor."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's inputs. Steps of equal shape have their inputs at equal addresses."""

    tokens: int
    """T."""
    sequences: int
    """N."""
    width: int
    """W: columns of the block tables."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of the device area, in the order of its layout."""

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
    """The same views of the host area, to be filled in by the caller."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sampled_rows: NDArray[np.int64]
    block_tables: NDArray[np.int32]


class InputBuffers:
    """The host and device area of step inputs; both grow with the steps. Inputs are valid until the next step.

    The caller must have synchronised with the previous step before it fills in the next one: the copy may still be
    reading the host area.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = self._on_device = torch.empty(0, dtype=torch.uint8)
        self._views: tuple[StepShape, HostInputs, StepInputs] | None = None
        """Views of the last shape: consecutive decode steps share it, and making views costs more than filling them."""

    def reserve(self, shapes: Iterable[StepShape]) -> None:
        """Allocate for steps of these shapes: their addresses do not change unless a larger shape comes."""
        self._grow(max(_num_bytes(shape) for shape in shapes))

    def host_views(self, shape: StepShape) -> HostInputs:
        """Views of the host area for a step of this shape; their contents are undefined."""
        return self._views_of(shape)[1]

    def send(self, shape: StepShape) -> StepInputs:
        """Copy the host area to the device, on the calling thread's stream; returns the device views."""
        if self._on_device is not self._host:
            num_bytes = _num_bytes(shape)
            self._on_device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        return self._views_of(shape)[2]

    def _views_of(self, shape: StepShape) -> tuple[StepShape, HostInputs, StepInputs]:
        if self._views is None or self._views[0] != shape:
            self._grow(_num_bytes(shape))
            host, on_device = _inputs(self._host, shape), _inputs(self._on_device, shape)
            arrays = (getattr(host, field.name).numpy() for field in fields(host))
            self._views = shape, HostInputs(*arrays), on_device
        return self._views

    def _grow(self, num_bytes: int) -> None:
        if num_bytes > len(self._host):
            self._host = self._device.pinned_empty(1 << (num_bytes - 1).bit_length())
            self._on_device = self._host.to(self._device.torch_device)


class OutputBuffer:
    """A pinned host buffer for results; it grows with them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Synchronise and copy the tensors to the host. The result is valid until the next call.

        CPU tensors are returned as they are.
        """
        if all(tensor.is_cpu for tensor in tensors):
            return list(tensors)
        ends = _ends([tensor.nbytes for tensor in tensors])
        if ends[-1] > len(self._host):
            self._host = self._device.pinned_empty(1 << (ends[-1] - 1).bit_length())
        fetched = []
        for tensor, start in zip(tensors, (0, *ends), strict=False):
            target = self._host[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            fetched.append(target.copy_(tensor, non_blocking=True))
        self._device.synchronize()
        return fetched


def _layout(shape: StepShape) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of each field of StepInputs, in order."""
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
    """Aligned end offsets of consecutive parts of these sizes."""
    ends, end = [], 0
    for size in sizes:
        end += _aligned(size)
        ends.append(end)
    return ends


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
