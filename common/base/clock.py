"""Clocks. The pure cores take `now` as a float of seconds; only the shells around them own a clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary point; never decreases."""
        ...


class MonotonicClock:
    """The machine's monotonic clock (`time.monotonic`)."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that only `advance` moves, for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> float:
        """Add `seconds` and return the new time. ValueError when `seconds` is negative."""
        if seconds < 0:
            raise ValueError(f"cannot advance a clock by {seconds} s: it would go backwards")
        self._now_s += seconds
        return self._now_s
