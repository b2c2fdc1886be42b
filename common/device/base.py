"""The Device interface: memory, threads, streams, rank groups and one op table, as types. Names no device.

A device is one file that implements `Device` and defines `BACKEND`, and one line of `DEVICES` in
`common/config/schema.py`. Code outside this package must not compare device names: a device states what it needs
(`shares_host_memory`, `default_steps_in_flight`, `graphs`, `supported_block_size`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Store as Store  # type: ignore[attr-defined]  # it exists; the stubs omit it

from kvferry.common.device.graphs import Graphs
from kvferry.common.device.ops import Ops


@dataclass(frozen=True, slots=True)
class DeviceProbe:
    """The devices of one kind on this machine. Probing never raises."""

    name: str
    """The name under which the device is registered."""
    available: bool
    detail: str
    """What was found, or what is missing and how to get it; one line that a user can read."""
    count: int = 0
    """Devices visible to this process."""


@dataclass(frozen=True, slots=True)
class KvTensorSpec:
    """One cache tensor of one layer, e.g. the keys of grouped heads."""

    name: str
    shape_per_token: tuple[int, ...]
    """(kv_heads, head_dim) for grouped heads."""
    dtype: torch.dtype
    shard_axis: int | None = 0
    """Axis of shape_per_token that tensor parallelism splits; None: replicated."""

    def whole_shape(self, ranks: int) -> tuple[int, ...]:
        """The shape per token of all ranks' shards together, given that this spec is one shard."""
        factors = (ranks if axis == self.shard_axis else 1 for axis in range(len(self.shape_per_token)))
        return tuple(size * factor for size, factor in zip(self.shape_per_token, factors, strict=True))


class Work(Protocol):
    """A collective operation in progress."""

    def wait(self) -> bool:
        """Order the calling thread's later work after the result. Raises RuntimeError if the operation failed."""
        ...


class Group(Protocol):
    """The ranks that compute one model together. torch.distributed's process groups match this type."""

    def rank(self) -> int:
        """This process's rank."""
        ...

    def size(self) -> int:
        """Number of ranks."""
        ...

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """Replace the one tensor given by the sum over all ranks."""
        ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work:
        """Gather the one input of every rank into `outputs`, one list of `size` tensors."""
        ...


MakeGroup = Callable[[Store, int, int, timedelta], Group]
"""(rendezvous store, rank, size, timeout of every operation) -> the group."""


class Device(Protocol):
    """One accelerator, or the CPU, as the engine sees it."""

    name: str
    """For messages only; see the module's docstring."""
    torch_device: torch.device
    shares_host_memory: bool
    """The device's memory is the host's: weights and caches of all ranks and the swap space come from one pool."""
    default_steps_in_flight: int
    """Steps in flight unless configured. 1 if an op has run when its call returns; 2 if calls only enqueue work."""

    @property
    def ops(self) -> Ops:
        """The op table."""
        ...

    def group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Group:
        """Join the other ranks of this node, each of which makes the same call; uses this device's own library.

        Blocks until all have joined. Raises RuntimeError after `timeout`.
        """
        ...

    def graphs(self) -> Graphs | None:
        """A new recorder of steps; None if steps cannot be recorded."""
        ...

    def activate_thread(self) -> None:
        """Bind the calling thread to this device. Every thread that uses the device must call this first."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes; memory that this process's allocator caches counts as free."""
        ...

    def allocate_layer_cache(
        self, specs: tuple[KvTensorSpec, ...], num_blocks: int, block_size: int
    ) -> tuple[Tensor, ...]:
        """One layer's cache tensors in this device's physical layout, in the order of `specs`.

        The first axis is the block in every layout.
        """
        ...

    def read_blocks(self, cache: Tensor, block_ids: Tensor) -> Tensor:
        """Convert blocks from the physical layout to canonical [len(block_ids), block_size, *shape_per_token]."""
        ...

    def write_tokens(self, cache: Tensor, slots: Tensor, tokens: Tensor) -> None:
        """Write tokens [n, *shape_per_token] at `slots` [n] (block * block_size + offset) of the physical layout."""
        ...

    def supported_block_size(self, wanted: int) -> int:
        """The smallest block size >= `wanted` that this device's kernels accept."""
        ...

    def pinned_empty(self, num_bytes: int) -> Tensor:
        """A uint8 host buffer for fast copies to and from the device."""
        ...

    def synchronize(self) -> None:
        """Wait until all work that this thread has enqueued is done."""
        ...

    def side_stream(self) -> AbstractContextManager[None]:
        """Run the work enqueued inside concurrently with the compute stream; wait for it on exit.

        It is not ordered after earlier work: what it reads must be complete and what it writes must not be in use.
        """
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """What a device's module defines as `BACKEND`, for the registry (`select`)."""

    probe: Callable[[], DeviceProbe]
    open: Callable[[int, int], Device]
    """(CPU threads, device index) -> the device, with the calling thread bound to it. Raises DeviceUnavailableError."""
    device_files: tuple[str, ...] = ()
    """Glob patterns below /dev that show that the hardware is present; empty: it always is."""
