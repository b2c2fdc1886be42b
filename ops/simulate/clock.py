"""Virtual time: a heap of things that will happen. Deterministic; knows nothing of what happens. No wall clock."""

import heapq
from collections.abc import Callable

Callback = Callable[..., None]


class EventLoop:
    """Runs callbacks in the order of their time; those of the same time in the order in which they were scheduled."""

    __slots__ = ("_heap", "_now_s", "_number", "num_done")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callback, tuple[object, ...]]] = []
        self._now_s = 0.0
        self._number = 0
        self.num_done = 0
        """Callbacks run so far."""

    def now(self) -> float:
        """Virtual seconds since the world began."""
        return self._now_s

    def at(self, time_s: float, callback: Callback, *arguments: object) -> None:
        """Do it at this time; in the past counts as now."""
        self._number += 1
        heapq.heappush(self._heap, (max(time_s, self._now_s), self._number, callback, arguments))

    def after(self, delay_s: float, callback: Callback, *arguments: object) -> None:
        """Do it that much later."""
        self.at(self._now_s + delay_s, callback, *arguments)

    def run_until(self, time_s: float) -> None:
        """Do all that is planned up to this time; it is this time afterwards."""
        heap = self._heap
        while heap and heap[0][0] <= time_s:
            self._now_s, _, callback, arguments = heapq.heappop(heap)
            self.num_done += 1
            callback(*arguments)
        self._now_s = max(self._now_s, time_s)
