"""An NVIDIA GPU: PyTorch's own ops on the paged layout. Calls torch.cuda on demand, never at import.

The test suite has no GPU and does not run this module; it runs its parts (`Accelerator`, `TorchOps`).
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch

from kvferry.common.base.errors import DeviceUnavailableError
from kvferry.common.device.accelerator import Accelerator, CacheRules
from kvferry.common.device.base import Backend, Device, DeviceProbe, Group, Store
from kvferry.common.device.graphs import AcceleratorGraphs, Step
from kvferry.common.device.torch_ops import TorchOps

_RULES = CacheRules(alignment=512, block_size_multiple=16, block_size_max=1024)
"""The ops are plain tensor code and set no limits; chosen: the allocator's granularity, and blocks worth a gather."""

_GRAPHS_MOST_TOKENS = 1 << 17
"""Attention reads everything that the block tables cover; beyond this it takes longer than launching the kernels."""


def probe_cuda() -> DeviceProbe:
    """Whether a GPU can be used here; never raises."""
    if torch.version.cuda is None and torch.version.hip is None:
        return DeviceProbe("cuda", False, f"torch {torch.__version__} is built without CUDA")
    try:
        count = torch.cuda.device_count()
        detail = torch.cuda.get_device_name(0) if count else "no GPU visible (driver, CUDA_VISIBLE_DEVICES)"
    except (RuntimeError, AssertionError, OSError) as error:
        return DeviceProbe("cuda", False, f"CUDA cannot be used: {error}")
    return DeviceProbe("cuda", count > 0, detail, count)


def open_cuda(index: int = 0) -> Device:
    """Bind the calling thread to GPU `index`. Raises DeviceUnavailableError naming what is missing."""
    probe = probe_cuda()
    if index >= probe.count:
        reason = f"only {probe.count} visible ({probe.detail})" if probe.count else probe.detail
        raise DeviceUnavailableError(f"device cuda:{index} is not available: {reason}")
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise DeviceUnavailableError(f"device cuda:{index} cannot be opened: {error}") from error

    def make_graphs() -> AcceleratorGraphs[torch.cuda.Stream]:
        return AcceleratorGraphs(torch.cuda, _stream(device), _Recorder().record, _GRAPHS_MOST_TOKENS)

    return Accelerator(device, TorchOps(), torch.cuda, _RULES, _stream(device), _nccl, make_graphs)


BACKEND = Backend(probe_cuda, lambda threads, index: open_cuda(index), device_files=("nvidia[0-9]*", "kfd"))


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


class _CudaGraph:
    """Implements `kvferry.common.device.graphs.Graph`. Ignores `lengths`: no kernel takes them from the host."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self, lengths: Sequence[int]) -> None:
        self._graph.replay()


class _Recorder:
    """`record` implements `kvferry.common.device.graphs.Record`; one memory pool for all its graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step, stream: torch.cuda.Stream) -> _CudaGraph:
        # thread_local: threads that transfer KV use the device too; their calls must not break the recording.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            step()
        return _CudaGraph(graph)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Group:
    from torch.distributed import ProcessGroupNCCL  # not at the top: builds without CUDA lack it

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(Group, ProcessGroupNCCL(store, rank, size, options))  # the stubs lack the group's methods
