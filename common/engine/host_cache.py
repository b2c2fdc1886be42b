"""KV blocks in host memory, for sequences that were swapped out: the copies between them and a cache on the device.

A block keeps the device's own layout. Which block belongs to whom is decided elsewhere; nothing here checks it.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvferry.common.base.errors import InvariantError
from kvferry.common.device.base import Device
from kvferry.common.engine.kv_cache import KvCache


class HostCache:
    """Copies are queued behind the calling thread's work on the device, and are done when it has synchronised."""

    def __init__(self, device: Device, cache: KvCache, num_blocks: int) -> None:
        """Takes cache.bytes_per_token * cache.block_size * num_blocks bytes of the host, page-locked where that helps.

        0 blocks take nothing.
        """
        self.num_blocks = num_blocks
        self._pairs = [
            (tensor, _like(device, tensor, num_blocks)) for layer in cache.layers for tensor in layer if num_blocks
        ]
        """(cache tensor on the device, the same for the host's blocks): the first axis of both is the block."""

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Device to host, first to first. ValueError: not as many of the one as of the other."""
        for device_start, host_start, count in runs(device_blocks, host_blocks):
            for tensor, host in self._pairs:
                host[host_start : host_start + count].copy_(
                    tensor[device_start : device_start + count], non_blocking=True
                )

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Host to device, first to first. ValueError: not as many of the one as of the other."""
        for device_start, host_start, count in runs(device_blocks, host_blocks):
            for tensor, host in self._pairs:
                tensor[device_start : device_start + count].copy_(
                    host[host_start : host_start + count], non_blocking=True
                )

    def check_invariants(self) -> None:
        """Every cache tensor has its counterpart of the same blocks. Raises InvariantError."""
        for tensor, host in self._pairs:
            if host.shape != (self.num_blocks, *tensor.shape[1:]) or host.dtype != tensor.dtype:
                raise InvariantError(f"host blocks {tuple(host.shape)} do not fit a cache of {tuple(tensor.shape)}")


def runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start in first, start in second, length) of the stretches in which both go up by one: each is one copy."""
    start = other = count = 0
    for one, two in zip(first, second, strict=True):
        if count and (one, two) == (start + count, other + count):
            count += 1
            continue
        if count:
            yield start, other, count
        start, other, count = one, two, 1
    if count:
        yield start, other, count


def _like(device: Device, tensor: Tensor, num_blocks: int) -> Tensor:
    num_bytes = tensor[:1].numel() * tensor.element_size() * num_blocks
    return device.pinned_empty(num_bytes).view(tensor.dtype).view(num_blocks, *tensor.shape[1:])
