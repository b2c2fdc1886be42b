"""The part of `Device` that accelerators have in common: memory, threads, streams, the paged layout. Names no device.

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
from kvferry.common.device.base import Group, KvTensorSpec, MakeGroup, Store
from kvferry.common.device.graphs import Graphs, Stream, StreamApi
from kvferry.common.device.ops import Ops
from kvferry.common.device.paged import allocate_paged, read_paged_blocks, write_paged_tokens


class AcceleratorApi(StreamApi[Stream], Protocol[Stream]):
    """The calls of torch.cuda and torch_npu.npu that this project makes, apart from ops."""

    def set_device(self, device: torch.device) -> None:
        """Bind the calling thread."""
        ...

    def empty_cache(self) -> None:
        """Return cached free memory to the device."""
        ...

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """(free, total) bytes."""
        ...

    def current_stream(self, device: torch.device) -> Stream:
        """The calling thread's stream."""
        ...


@dataclass(frozen=True, slots=True)
class CacheRules:
    """Constraints of a device's kernels and transports on the KV cache."""

    alignment: int
    """Bytes; each tensor starts at a multiple of it."""
    block_size_multiple: int
    block_size_max: int

    def block_size(self, wanted: int, device_name: str) -> int:
        """Round `wanted` up to a size that the attention kernels accept. Raises ConfigError above the largest."""
        size = -(-wanted // self.block_size_multiple) * self.block_size_multiple
        if size > self.block_size_max:
            raise ConfigError(
                f"node.block_size {wanted} is too large for {device_name}, which supports multiples of "
                f"{self.block_size_multiple} up to {self.block_size_max}"
            )
        return size


class Accelerator(Generic[Stream]):
    """Implements `kvferry.common.device.base.Device` over an `AcceleratorApi`. The constructor makes no device call."""

    shares_host_memory = False
    default_steps_in_flight = 2

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
        # The runtimes keep the current device per thread; a new thread starts with device 0.
        self._api.set_device(self.torch_device)

    def group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Group:
        return self._make_group(store, rank, size, timeout)

    def graphs(self) -> Graphs | None:
        return self._make_graphs()

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of this device, after the allocator has returned its cached memory."""
        self._api.empty_cache()
        return self._api.mem_get_info(self.torch_device)

    def allocate_layer_cache(
        self, specs: tuple[KvTensorSpec, ...], num_blocks: int, block_size: int
    ) -> tuple[Tensor, ...]:
        """One layer's tensors [num_blocks, block_size, *shape_per_token], zeroed, in one allocation."""
        return allocate_paged(specs, num_blocks, block_size, self.torch_device, self._rules.alignment)

    def read_blocks(self, cache: Tensor, block_ids: Tensor) -> Tensor:
        """[len(block_ids), block_size, *shape_per_token] on this device, in the calling thread's stream order."""
        return read_paged_blocks(cache, block_ids)

    def write_tokens(self, cache: Tensor, slots: Tensor, tokens: Tensor) -> None:
        """Write tokens [n, *shape_per_token] at `slots` [n]; host tensors are copied to the device first."""
        write_paged_tokens(cache, slots, tokens)

    def supported_block_size(self, wanted: int) -> int:
        """Round `wanted` up to a size that the attention kernels accept. Raises ConfigError above the largest."""
        return self._rules.block_size(wanted, self.name)

    def pinned_empty(self, num_bytes: int) -> Tensor:
        """A page-locked uint8 host buffer."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        self._api.current_stream(self.torch_device).synchronize()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        with self._api.stream(self._side_stream):
            yield
            self._side_stream.synchronize()
