"""The CPU as a device: threads, memory, and a cache layout that decoding reads in whole blocks per kv head.

Ops are the native kernels if their library is built, else torch's (`native.select`).
"""

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
from kvferry.common.device.base import Backend, DeviceProbe, Group, KvTensorSpec, Store
from kvferry.common.device.cpu_ops import CpuOps
from kvferry.common.device.graphs import Graphs
from kvferry.common.device.native.select import cpu_ops
from kvferry.common.device.ops import Ops


class CpuDevice:
    """Implements `kvferry.common.device.base.Device`.

    A cache tensor with shape_per_token (heads, D) has the layout [num_blocks, heads, block_size, D]; any other shape
    has [num_blocks, block_size, *shape_per_token]. The number of dimensions distinguishes the two.
    """

    name = "cpu"
    shares_host_memory = True
    default_steps_in_flight = 1

    def __init__(self, threads: int = 0, ops: Ops | None = None) -> None:
        """`threads`: for the engine thread's matmuls; 0 keeps torch's default. `ops`: None takes torch's."""
        if threads < 0:
            raise ValueError(f"threads must not be negative, got {threads}")
        self.threads = threads
        self.torch_device = torch.device("cpu")
        self.ops: Ops = ops or CpuOps()

    def graphs(self) -> Graphs | None:
        return None  # ops run when they are called: there is no launch to save

    def activate_thread(self) -> None:
        # OpenMP keeps the number of threads per calling thread.
        if self.threads:
            torch.set_num_threads(self.threads)

    def group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Group:
        """A gloo group over loopback: the ranks of a node are on one host."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return cast(Group, ProcessGroupGloo(store, rank, size, options))  # the stubs lack the group's methods

    def memory_info(self) -> tuple[int, int]:
        """(available, total) bytes of main memory; available respects a container's limit."""
        return probe_host().free_memory_bytes, psutil.virtual_memory().total

    def allocate_layer_cache(
        self, specs: tuple[KvTensorSpec, ...], num_blocks: int, block_size: int
    ) -> tuple[Tensor, ...]:
        """Zeroed cache tensors; the system allocates their pages on first write."""
        return tuple(
            _zeroed(_physical_shape(spec.shape_per_token, num_blocks, block_size), spec.dtype) for spec in specs
        )

    def read_blocks(self, cache: Tensor, block_ids: Tensor) -> Tensor:
        """[len(block_ids), block_size, *shape_per_token]; a copy, not always contiguous."""
        blocks = cache.index_select(0, block_ids.long())
        return blocks.transpose(1, 2) if _by_head(cache) else blocks

    def write_tokens(self, cache: Tensor, slots: Tensor, tokens: Tensor) -> None:
        """Write tokens [n, *shape_per_token] at `slots` [n] (block * block_size + offset)."""
        slots = slots.long()
        if not _by_head(cache):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, tokens.to(cache.dtype))
            return
        _, heads, block_size, size = cache.shape
        blocks, offsets = slots // block_size, slots % block_size
        rows = (blocks[:, None] * heads + torch.arange(heads)) * block_size + offsets[:, None]
        cache.view(-1, size).index_copy_(0, rows.reshape(-1), tokens.to(cache.dtype).reshape(-1, size))

    def supported_block_size(self, wanted: int) -> int:
        return wanted  # any size works

    def pinned_empty(self, num_bytes: int) -> Tensor:
        # Plain memory: no copy to a device follows.
        return torch.empty(num_bytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Do nothing: an op has finished when it returns."""

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()  # other threads run concurrently anyway


def probe_cpu() -> DeviceProbe:
    """The CPU is always available; reports its vector instructions and torch's version."""
    return DeviceProbe("cpu", True, f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}", 1)


BACKEND = Backend(probe_cpu, lambda threads, index: CpuDevice(threads, cpu_ops()))


def _by_head(cache: Tensor) -> bool:
    return cache.dim() == 4


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on pages that the system allocates on first write; torch.zeros would write all of them now."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _physical_shape(shape_per_token: tuple[int, ...], num_blocks: int, block_size: int) -> tuple[int, ...]:
    if len(shape_per_token) == 2:
        heads, size = shape_per_token
        return (num_blocks, heads, block_size, size)
    return (num_blocks, block_size, *shape_per_token)
