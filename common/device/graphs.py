"""Steps of the model that are recorded once and replayed in one call: what a device offers for it. Names no device.

Starting some hundred kernels one by one takes longer than they run when a step has few tokens; a recorded step is
started as a whole. What is recorded is work alone: addresses, shapes and the host's numbers stay as they were.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol

from kvferry.common.device.streams import Stream, StreamApi

Step = Callable[[], None]
"""Gives the device work that reads and writes memory which outlives the recording. It waits for nothing, and what it
gives does not depend on what is in that memory."""


class Graph(Protocol):
    """A recorded step."""

    def replay(self, lengths: Sequence[int]) -> None:
        """Give the device that work again, on what is in its memory by then, in the order of the thread's work.

        `lengths`: the sequences' of this time (`AttentionMetadata.seq_lens`), for kernels that take them from the host.
        """
        ...


class Graphs(Protocol):
    """Records steps. Its graphs share the memory that their steps take in between: only one may run at a time."""

    most_tokens: int
    """Steps whose block tables cover more tokens, all together, are not worth a recording: their kernels run longer
    than they take to be started, or they take much memory."""

    def capture(self, step: Step) -> Graph:
        """Do `step`, then record it. What it reads must be complete. RuntimeError: it cannot be recorded."""
        ...


Record = Callable[[Step, Stream], Graph]
"""(step, the stream to record on) -> its graph, by a device's own means."""


class AcceleratorGraphs(Generic[Stream]):
    """Implements Graphs for cuda and npu."""

    def __init__(self, api: StreamApi[Stream], stream: Stream, record: Record[Stream], most_tokens: int) -> None:
        """`stream`: one that nothing else uses."""
        self.most_tokens = most_tokens
        self._api = api
        self._stream = stream
        self._record = record

    def capture(self, step: Step) -> Graph:
        """First as it is, for what libraries and kernels make when they are first used: that cannot be recorded."""
        with self._api.stream(self._stream):
            step()
            self._stream.synchronize()
        return self._record(step, self._stream)
