"""Recording a model step once and replaying it in one call: streams, graphs and the recorder. Names no device.

Launching hundreds of kernels one by one takes longer than running them when a step has few tokens; a recorded step is
launched as a whole. Only the work is recorded: addresses, shapes and host values stay those of the recording.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar


class DeviceStream(Protocol):
    """A queue of work on a device."""

    def synchronize(self) -> None:
        """Wait until all work enqueued so far is done."""
        ...


Stream = TypeVar("Stream", bound=DeviceStream)
StreamArgument = TypeVar("StreamArgument", bound=DeviceStream, contravariant=True)


class StreamApi(Protocol[StreamArgument]):
    """The stream context of torch.cuda and torch_npu.npu."""

    def stream(self, stream: StreamArgument) -> AbstractContextManager[object]:
        """Work enqueued inside goes to `stream`."""
        ...


Step = Callable[[], None]
"""Enqueues work that reads and writes memory which outlives the recording. It must not wait for the device, and the
work it enqueues must not depend on the contents of that memory."""


class Graph(Protocol):
    """A recorded step."""

    def replay(self, lengths: Sequence[int]) -> None:
        """Enqueue the recorded work again, in the thread's stream order, on the current contents of its memory.

        `lengths`: the sequence lengths of this step (`AttentionMetadata.seq_lens`), for kernels that take them from
        the host.
        """
        ...


class Graphs(Protocol):
    """Records steps. The graphs of one recorder share their intermediate memory: only one may run at a time."""

    most_tokens: int
    """Steps whose block tables cover more tokens in total are not worth recording: their kernels run longer than it
    takes to launch them, or they take much memory."""

    def capture(self, step: Step) -> Graph:
        """Run `step`, then record it. Its inputs must be complete. Raises RuntimeError if it cannot be recorded."""
        ...


Record = Callable[[Step, Stream], Graph]
"""(step, the stream to record on) -> its graph."""


class AcceleratorGraphs(Generic[Stream]):
    """Implements Graphs over a device's `Record` function."""

    def __init__(self, api: StreamApi[Stream], stream: Stream, record: Record[Stream], most_tokens: int) -> None:
        """`stream` must not be used by anything else."""
        self.most_tokens = most_tokens
        self._api = api
        self._stream = stream
        self._record = record

    def capture(self, step: Step) -> Graph:
        # The first run is not recorded: libraries and kernels allocate on first use, which cannot be recorded.
        with self._api.stream(self._stream):
            step()
            self._stream.synchronize()
        return self._record(step, self._stream)
