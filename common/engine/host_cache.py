"""KV blocks in host memory for swapped-out sequences, and the copies to and from the cache on the device.

A block keeps the device's own layout. Block ownership is decided by the scheduler; nothing here checks it.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvferry.common.base.errors import InvariantError
from kvferry.common.device.base import Device
from kvferry.common.engine.kv_cache import KvCache


class HostCache:
    """Host blocks. Copies are queued on the calling thread's stream and are complete when it has synchronised."""

    def __init__(self, device: Device, cache: KvCache, num_blocks: int) -> None:
        """Allocates cache.bytes_per_token * cache.block_size * num_blocks host bytes, pinned if the device gains by it.

        With 0 blocks nothing is allocated.
        """
        self.num_blocks = num_blocks
        self._pairs = [
            (tensor, _like(device, tensor, num_blocks)) for layer in cache.layers for tensor in layer if num_blocks
        ]
        """(cache tensor on the device, its host counterpart): the first axis of both is the block."""

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy device blocks to host blocks, in order. Raises ValueError when the lengths differ."""
        for device_start, host_start, count in runs(device_blocks, host_blocks):
            for tensor, host in self._pairs:
                host[host_start : host_start + count].copy_(
                    tensor[device_start : device_start + count], non_blocking=True
                )

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy host blocks to device blocks, in order. Raises ValueError when the lengths differ."""
        for device_start, host_start, count in runs(device_blocks, host_blocks):
            for tensor, host in self._pairs:
                tensor[device_start : device_start + count].copy_(
                    host[host_start : host_start + count], non_blocking=True
                )

    def check_invariants(self) -> None:
        """Every cache tensor has a host counterpart of the same block shape. Raises InvariantError."""
        for tensor, host in self._pairs:
            if host.shape != (self.num_blocks, *tensor.shape[1:]) or host.dtype != tensor.dtype:
                raise InvariantError(f"host blocks {tuple(host.shape)} do not fit a cache of {tuple(tensor.shape)}")


def runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start in first, start in second, length) of the runs in which both increase by one: each run is one copy."""
    first_start = second_start = count = 0
    for one, two in zip(first, second, strict=True):
        if count and (one, two) == (first_start + count, second_start + count):
            count += 1
            continue
        if count:
            yield first_start, second_start, count
        first_start, second_start, count = one, two, 1
    if count:
        yield first_start, second_start, count


def _like(device: Device, tensor: Tensor, num_blocks: int) -> Tensor:
    num_bytes = tensor[:1].numel() * tensor.element_size() * num_blocks
    return device.pinned_empty(num_bytes).view(tensor.dtype).view(num_blocks, *tensor.shape[1:])
