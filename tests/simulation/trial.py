"""Runs one schedule and reports how it failed. The only place that catches exceptions of a schedule."""

import gc
import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from types import FrameType

from tests.simulation.checks import Violation
from tests.simulation.profiles import PROFILES
from tests.simulation.run import Run
from tests.simulation.schedule import Schedule

CPU_LIMIT_S = 60
"""More than ten times the need of any schedule."""
_KIND_CHARS = 60


@dataclass(frozen=True, slots=True)
class Failure:
    """How a schedule failed."""

    text: str
    """Type and message of the exception."""
    at_s: float
    """Virtual time of the failure."""
    where: str
    """The innermost lines of the traceback."""

    @property
    def kind(self) -> str:
        """The text without ids and numbers: the same defect has the same kind for other requests, hosts and times."""
        return re.sub(r"\b[0-9a-f]{6,}\b|[-\d.]*\d", "#", self.text)[:_KIND_CHARS]


def profile_of(choice: str, seed: int) -> str:
    """Return the profile of a seed: the chosen one, or for `each` one of all.

    A new profile takes its share of the seeds and all other seeds keep their profiles (rendezvous hashing, Thaler and
    Ravishankar 1998), so the next torture repeats a schedule that failed before.
    """
    return max(PROFILES, key=lambda name: sha256(f"{name}:{seed}".encode()).digest()) if choice == "each" else choice


def attempt(run: Run) -> Failure | None:
    """Run a schedule; return None when every invariant held. Any exception is a failure, and so is an endless run."""
    try:
        with _cpu_limit():
            run.run()
    except Exception as error:  # noqa: BLE001  (see above)
        where = "".join(traceback.format_exception(error, limit=-8))
        return Failure(f"{type(error).__name__}: {error}", run.world.loop.now(), where)
    return None


def ease_collector() -> None:
    """Collect garbage less often, for a process that runs many schedules.

    A world is one large reference cycle; looking for garbage every few hundred allocations costs a sixth of the time.
    """
    gc.set_threshold(50_000, 10, 10)


def try_schedule(schedule: Schedule, check_every: int = 64) -> Failure | None:
    """Run a schedule without a trace; return its failure, if any."""
    return attempt(Run(schedule, check_every))


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """Raise Violation inside the block when it exceeds CPU_LIMIT_S. Main thread only."""

    def stop(_: int, __: FrameType | None) -> None:
        raise Violation(f"endless run: stopped after {CPU_LIMIT_S} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
