"""Detects that this process itself slept, so that it does not blame its peers for its own silence. Pure."""

from dataclasses import dataclass

from kvferry.common.config.protocol import Timers


@dataclass(slots=True)
class SleepDetector:
    """Protocol rule 9. Of the time before a late tick one heartbeat interval counts as silence of the peers, the rest
    as sleep. If none of it counted, a process whose ticks are always late would never notice a
    silence."""

    timers: Timers
    _last: float | None = None

    def slept_s(self, now: float) -> float:
        """Call once per tick. Returns by how much to move forward the times at which peers were last heard, up to now:
        messages that waited during the sleep are processed before the tick."""
        gap_s = 0.0 if self._last is None else now - self._last
        self._last = now
        if gap_s <= self.timers.late_tick_s:
            return 0.0
        return gap_s - min(self.timers.heartbeat_s, self.timers.late_tick_s)
