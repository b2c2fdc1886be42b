"""When a child that died starts again: a wait that doubles with every quick death. Pure; `now` is passed in."""

from dataclasses import dataclass

from kvferry.common.base.errors import InvariantError


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """The waits, in seconds."""

    min_s: float
    max_s: float
    healthy_after_s: float
    """A child that lived this long starts again with the shortest wait."""


class RestartPolicy:
    """One child's history of deaths, as far as it matters."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._started_at: float | None = None
        self._quick_deaths = 0

    @property
    def quick_deaths(self) -> int:
        """Deaths in a row, none of which came after healthy_after_s."""
        return self._quick_deaths

    def started(self, now: float) -> None:
        """The child runs since now."""
        self._started_at = now

    def died(self, now: float) -> float:
        """The child is gone; returns the time at which to start it again."""
        if self._started_at is None:
            raise InvariantError("a child died that was not started")
        lived_s = now - self._started_at
        self._started_at = None
        self._quick_deaths = 1 if lived_s >= self._limits.healthy_after_s else self._quick_deaths + 1
        # The exponent is bounded so that a long night of deaths does not overflow a float.
        doubled = self._limits.min_s * 2.0 ** min(self._quick_deaths - 1, 64)
        return now + min(doubled, self._limits.max_s)

    def check_invariants(self) -> None:
        """InvariantError when the counts make no sense."""
        if self._quick_deaths < 0:
            raise InvariantError("a negative number of deaths")
