"""Restart delay of a child: exponential backoff over quick deaths. Pure; `now` is passed in."""

from dataclasses import dataclass

from kvferry.common.base.errors import InvariantError


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Bounds of the restart delay, in seconds."""

    min_s: float
    max_s: float
    healthy_after_s: float
    """A child that ran this long is restarted with the shortest delay."""


class RestartPolicy:
    """Counts one child's quick deaths in a row."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._started_at: float | None = None
        self._quick_deaths = 0

    @property
    def quick_deaths(self) -> int:
        """Deaths in a row, each within healthy_after_s of its start."""
        return self._quick_deaths

    def started(self, now: float) -> None:
        self._started_at = now

    def died(self, now: float) -> float:
        """Returns the time at which to restart the child."""
        if self._started_at is None:
            raise InvariantError("a child exited that was not started")
        lived_s = now - self._started_at
        self._started_at = None
        self._quick_deaths = 1 if lived_s >= self._limits.healthy_after_s else self._quick_deaths + 1
        # The exponent is bounded so that thousands of deaths do not overflow a float.
        doubled = self._limits.min_s * 2.0 ** min(self._quick_deaths - 1, 64)
        return now + min(doubled, self._limits.max_s)

    def check_invariants(self) -> None:
        if self._quick_deaths < 0:
            raise InvariantError("a negative number of deaths")
