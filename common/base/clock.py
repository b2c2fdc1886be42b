"""Time as a value that is handed in. Cores take `now` as a float of seconds; only shells own a clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Something that tells monotonic seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary point; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()


class ManualClock:
    """A clock driven by hand, for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The seconds it was last set to."""
        return self._now_s

    def advance(self, seconds: float) -> float:
        """Move on by `seconds` (not negative) and return the new time."""
        if seconds < 0:
            raise ValueError("a clock does not go back")
        self._now_s += seconds
        return self._now_s
