"""When this process itself came late: what others are not blamed for. Pure."""

from dataclasses import dataclass

from kvferry.common.config.protocol import Timers


@dataclass(slots=True)
class SleepDetector:
    """Rule 9. Of the time before a late tick as much as a beat counts to the silence of others: the rest was slept.

    Not nothing: who is always late would notice no silence ever.
    """

    timers: Timers
    _last: float | None = None

    def slept_s(self, now: float) -> float:
        """To be asked at each tick: what to move the times forward by at which others were heard before it, but not
        beyond now, for what waited meanwhile has been taken in."""
        gap_s = 0.0 if self._last is None else now - self._last
        self._last = now
        if gap_s <= self.timers.late_tick_s:
            return 0.0
        return gap_s - min(self.timers.heartbeat_s, self.timers.late_tick_s)
