"""Recording steps on an Ascend NPU. Does not import torch_npu: the module is handed in.

The attention kernel takes the sequences' lengths from the host, so a recorded call of it would have those of the
recording for ever. torch_npu's own recording mode (`auto_dispatch_capture`) keeps such calls apart, and `update` gives
them other lengths. Checked against the real module by `tests/npu`; never run on an NPU.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvferry.common.device.graphs import Step
from kvferry.common.device.streams import DeviceStream


class NpuGraphHandle(Protocol):
    """The part of torch_npu.npu.NPUGraph that is called."""

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        """One dictionary for all kept calls: names of arguments, and what they are from now on."""
        ...

    def replay(self) -> None:
        """Start the recorded work."""
        ...


class NpuGraphApi(Protocol):
    """The part of torch_npu.npu that is called."""

    @property
    def NPUGraph(self) -> Callable[[], NpuGraphHandle]:  # noqa: N802  its name there
        """Makes an empty one."""
        ...

    def graph_pool_handle(self) -> object:
        """Names memory that no graph has used yet."""
        ...

    def graph(
        self, npu_graph: NpuGraphHandle, pool: object, stream: DeviceStream, auto_dispatch_capture: bool,
        capture_error_mode: str,
    ) -> AbstractContextManager[object]:  # fmt: skip
        """Work given inside is recorded."""
        ...


class NpuGraph:
    """Implements `kvferry.common.device.graphs.Graph`."""

    def __init__(self, handle: NpuGraphHandle) -> None:
        self._handle = handle

    def replay(self, lengths: Sequence[int]) -> None:
        """The recorded work waits for each kept call to be updated, so that comes first: it may fail."""
        self._handle.update(cpu_update_input=[{"actual_seq_lengths_kv": list(lengths)}])
        self._handle.replay()


class NpuRecorder:
    """Its `record` is a `kvferry.common.device.graphs.Record`."""

    def __init__(self, npu: NpuGraphApi) -> None:
        self._npu = npu
        self._pool = npu.graph_pool_handle()

    def record(self, step: Step, stream: DeviceStream) -> NpuGraph:
        """Threads that move KV use the device as well; what they do shall not break the recording."""
        handle = self._npu.NPUGraph()
        with self._npu.graph(
            handle, pool=self._pool, stream=stream, auto_dispatch_capture=True, capture_error_mode="thread_local"
        ):
            step()
        return NpuGraph(handle)
