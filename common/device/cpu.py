"""The CPU as a device: threads, memory, and a cache layout that decoding reads in whole blocks per kv head."""

import math
import mmap
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import cast

import psutil
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from kvferry.common.config.host import probe_host
from kvferry.common.device.base import Group, KvTensorSpec, Ops, Store
from kvferry.common.device.cpu_ops import CpuOps
from kvferry.common.device.graphs import Graphs


class CpuDevice:
    """Implements `kvferry.common.device.base.Device`.

    A cache tensor of shape_per_token (heads, D) lies as [num_blocks, heads, block_size, D]; any other shape as
    [num_blocks, block_size, *shape_per_token]. The number of dimensions tells which.
    """

    name = "cpu"

    def __init__(self, threads: int = 0, ops: Ops | None = None) -> None:
        """`threads`: for matmuls of the engine thread; 0 leaves torch's own default. `ops`: None takes torch's."""
        if threads < 0:
            raise ValueError(f"threads must not be negative, got {threads}")
        self.threads = threads
        self.torch_device = torch.device("cpu")
        self.ops: Ops = ops or CpuOps()

    def graphs(self) -> Graphs | None:
        """None: an op that is called has begun."""
        return None

    def activate_thread(self) -> None:
        """Sets the calling thread's number of compute threads: OpenMP keeps it per thread."""
        if self.threads:
            torch.set_num_threads(self.threads)

    def group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Group:
        """By gloo, over loopback: the ranks of a node are on one host."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return cast(Group, ProcessGroupGloo(store, rank, size, options))  # its stubs lack what groups do

    def memory_info(self) -> tuple[int, int]:
        """(available, total) bytes of main memory; what a container allows counts."""
        return probe_host().free_memory_bytes, psutil.virtual_memory().total

    def allocate_layer_cache(
        self, specs: tuple[KvTensorSpec, ...], num_blocks: int, block_size: int
    ) -> tuple[Tensor, ...]:
        """Zeroed cache tensors; the system gives the memory when it is first written."""
        return tuple(
            _zeroed(_physical_shape(spec.shape_per_token, num_blocks, block_size), spec.dtype) for spec in specs
        )

    def read_blocks(self, cache: Tensor, block_ids: Tensor) -> Tensor:
        """[len(block_ids), block_size, *shape_per_token]; a copy, perhaps not contiguous."""
        blocks = cache.index_select(0, block_ids.long())
        return blocks.transpose(1, 2) if _by_head(cache) else blocks

    def write_tokens(self, cache: Tensor, slots: Tensor, tokens: Tensor) -> None:
        """Put tokens [n, *shape_per_token] at `slots` [n] (block * block_size + offset)."""
        slots = slots.long()
        if not _by_head(cache):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, tokens.to(cache.dtype))
            return
        _, heads, block_size, size = cache.shape
        blocks, offsets = slots // block_size, slots % block_size
        rows = (blocks[:, None] * heads + torch.arange(heads)) * block_size + offsets[:, None]
        cache.view(-1, size).index_copy_(0, rows.reshape(-1), tokens.to(cache.dtype).reshape(-1, size))

    def supported_block_size(self, wanted: int) -> int:
        """Any block size is fine."""
        return wanted

    def pinned_empty(self, num_bytes: int) -> Tensor:
        """Plain memory: there is nothing to copy to."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Ops are done when they return."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Threads are beside each other as they are."""
        return nullcontext()


def _by_head(cache: Tensor) -> bool:
    return cache.dim() == 4


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on pages that the system gives when they are first written; torch.zeros would write them all now."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _physical_shape(shape_per_token: tuple[int, ...], num_blocks: int, block_size: int) -> tuple[int, ...]:
    if len(shape_per_token) == 2:
        heads, size = shape_per_token
        return (num_blocks, heads, block_size, size)
    return (num_blocks, block_size, *shape_per_token)
