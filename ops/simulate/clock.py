"""Virtual time: a heap of scheduled callbacks. Deterministic; no wall clock, no threads."""

import heapq
from collections.abc import Callable

Callback = Callable[..., None]


class EventLoop:
    """Runs callbacks in order of their time; those of the same time in the order of scheduling."""

    __slots__ = ("_heap", "_now_s", "_sequence_no", "num_done")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callback, tuple[object, ...]]] = []
        self._now_s = 0.0
        self._sequence_no = 0
        self.num_done = 0
        """Callbacks run so far."""

    def now(self) -> float:
        """Virtual seconds since the start of the world."""
        return self._now_s

    def at(self, time_s: float, callback: Callback, *arguments: object) -> None:
        """Schedule a callback at this time; a time in the past means now."""
        self._sequence_no += 1
        heapq.heappush(self._heap, (max(time_s, self._now_s), self._sequence_no, callback, arguments))

    def after(self, delay_s: float, callback: Callback, *arguments: object) -> None:
        self.at(self._now_s + delay_s, callback, *arguments)

    def run_until(self, time_s: float) -> None:
        """Run every callback scheduled up to this time, then set the clock to it."""
        heap = self._heap
        while heap and heap[0][0] <= time_s:
            self._now_s, _, callback, arguments = heapq.heappop(heap)
            self.num_done += 1
            callback(*arguments)
        self._now_s = max(self._now_s, time_s)
