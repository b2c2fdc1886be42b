"""Recording steps on an Ascend NPU. Does not import torch_npu: the module is passed in.

The attention kernel takes the sequence lengths from the host, so a recorded call would keep the lengths of the
recording. torch_npu's own recording mode (`auto_dispatch_capture`) tracks such calls, and `update` sets new lengths.
Checked against the real module by `tests/npu`; never run on an NPU.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvferry.common.device.graphs import DeviceStream, Step


class NpuGraphHandle(Protocol):
    """The part of torch_npu.npu.NPUGraph that is called."""

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        """Set arguments of all tracked calls: one dictionary from argument names to new values."""
        ...

    def replay(self) -> None:
        """Enqueue the recorded work."""
        ...


class NpuGraphApi(Protocol):
    """The part of torch_npu.npu that is called."""

    @property
    def NPUGraph(self) -> Callable[[], NpuGraphHandle]:  # noqa: N802  torch_npu's name
        """Makes an empty graph."""
        ...

    def graph_pool_handle(self) -> object:
        """A handle to a new memory pool."""
        ...

    def graph(
        self, npu_graph: NpuGraphHandle, pool: object, stream: DeviceStream, auto_dispatch_capture: bool,
        capture_error_mode: str,
    ) -> AbstractContextManager[object]:  # fmt: skip
        """Work enqueued inside is recorded."""
        ...


class NpuGraph:
    """Implements `kvferry.common.device.graphs.Graph`."""

    def __init__(self, handle: NpuGraphHandle) -> None:
        self._handle = handle

    def replay(self, lengths: Sequence[int]) -> None:
        # Update first, since it may fail: the recorded work waits until every tracked call has been updated.
        self._handle.update(cpu_update_input=[{"actual_seq_lengths_kv": list(lengths)}])
        self._handle.replay()


class NpuRecorder:
    """`record` implements `kvferry.common.device.graphs.Record`; one memory pool for all its graphs."""

    def __init__(self, npu: NpuGraphApi) -> None:
        self._npu = npu
        self._pool = npu.graph_pool_handle()

    def record(self, step: Step, stream: DeviceStream) -> NpuGraph:
        # thread_local: threads that transfer KV use the device too; their calls must not break the recording.
        handle = self._npu.NPUGraph()
        with self._npu.graph(
            handle, pool=self._pool, stream=stream, auto_dispatch_capture=True, capture_error_mode="thread_local"
        ):
            step()
        return NpuGraph(handle)
