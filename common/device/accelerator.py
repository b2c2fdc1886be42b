"""What cuda and npu have in common: memory, threads, streams, the paged layout. Names neither of them.

torch.cuda and torch_npu.npu offer the same calls under the same names; `AcceleratorApi` lists those used here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, Protocol

import torch
from torch import Tensor

from kvferry.common.base.errors import ConfigError
from kvferry.common.device.base import Group, KvTensorSpec, MakeGroup, Ops, Store
from kvferry.common.device.graphs import Graphs
from kvferry.common.device.paged import allocate_paged, read_paged_blocks, write_paged_tokens
from kvferry.common.device.streams import Stream, StreamApi


class AcceleratorApi(StreamApi[Stream], Protocol[Stream]):
    """The calls of torch.cuda and torch_npu.npu that this project makes outside of ops."""

    def set_device(self, device: torch.device) -> None:
        """Bind the calling thread."""
        ...

    def empty_cache(self) -> None:
        """Give memory back that was freed and kept."""
        ...

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """(free, total) bytes."""
        ...

    def current_stream(self, device: torch.device) -> Stream:
        """The calling thread's stream."""
        ...


@dataclass(frozen=True, slots=True)
class CacheRules:
    """What a device's kernels and transports ask of the cache."""

    alignment: int
    """Each tensor starts at a multiple of so many bytes."""
    block_size_multiple: int
    block_size_max: int

    def block_size(self, wanted: int, device_name: str) -> int:
        """`wanted`, rounded up to what the attention kernels take. Raises ConfigError where there is none."""
        size = -(-wanted // self.block_size_multiple) * self.block_size_multiple
        if size > self.block_size_max:
            raise ConfigError(
                f"node.block_size {wanted} is too large for {device_name}: it takes multiples of "
                f"{self.block_size_multiple} up to {self.block_size_max}"
            )
        return size


class Accelerator(Generic[Stream]):
    """Implements `kvferry.common.device.base.Device` over an `AcceleratorApi`. The constructor touches no device."""

    def __init__(
        self,
        device: torch.device,
        ops: Ops,
        api: AcceleratorApi[Stream],
        rules: CacheRules,
        side_stream: Stream,
        make_group: MakeGroup,
        make_graphs: Callable[[], Graphs],
    ) -> None:
        self.name = device.type
        self.torch_device = device
        self.ops = ops
        self._api = api
        self._rules = rules
        self._side_stream = side_stream
        self._make_group = make_group
        self._make_graphs = make_graphs

    def activate_thread(self) -> None:
        """Bind the calling thread; the runtimes keep the current device per thread, and a new thread has device 0."""
        self._api.set_device(self.torch_device)

    def group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Group:
        """By the device's own library. Its ranks are bound to a device each."""
        return self._make_group(store, rank, size, timeout)

    def graphs(self) -> Graphs | None:
        """A new recorder."""
        return self._make_graphs()

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of this device, after the allocator has given back what it does not use."""
        self._api.empty_cache()
        return self._api.mem_get_info(self.torch_device)

    def allocate_layer_cache(
        self, specs: tuple[KvTensorSpec, ...], num_blocks: int, block_size: int
    ) -> tuple[Tensor, ...]:
        """One layer's tensors [num_blocks, block_size, *shape_per_token], zeroed, in one allocation."""
        return allocate_paged(specs, num_blocks, block_size, self.torch_device, self._rules.alignment)

    def read_blocks(self, cache: Tensor, block_ids: Tensor) -> Tensor:
        """[len(block_ids), block_size, *shape_per_token] on this device, in the order of the calling thread's work."""
        return read_paged_blocks(cache, block_ids)

    def write_tokens(self, cache: Tensor, slots: Tensor, tokens: Tensor) -> None:
        """Put tokens [n, *shape_per_token] at `slots` [n]; host tensors are copied over first."""
        write_paged_tokens(cache, slots, tokens)

    def supported_block_size(self, wanted: int) -> int:
        """`wanted`, rounded up to what the attention kernels take. Raises ConfigError where there is none."""
        return self._rules.block_size(wanted, self.name)

    def pinned_empty(self, num_bytes: int) -> Tensor:
        """A page-locked uint8 buffer on the host."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        """Wait for the calling thread's stream."""
        self._api.current_stream(self.torch_device).synchronize()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Copies given inside run beside the compute; on leaving they are done."""
        with self._api.stream(self._side_stream):
            yield
            self._side_stream.synchronize()
