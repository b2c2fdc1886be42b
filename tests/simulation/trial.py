"""One schedule tried: what came of it, or how it failed. The one place that catches what a schedule raises."""

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
"""No schedule needs a tenth of this."""
_KIND_CHARS = 60


@dataclass(frozen=True, slots=True)
class Failure:
    """How a schedule failed."""

    text: str
    """Type and message of what was raised."""
    at_s: float
    """Virtual time."""
    where: str
    """The innermost lines of the traceback."""

    @property
    def kind(self) -> str:
        """What stays the same when other requests, hosts and times meet the same defect."""
        return re.sub(r"\b[0-9a-f]{6,}\b|[-\d.]*\d", "#", self.text)[:_KIND_CHARS]


def profile_of(choice: str, seed: int) -> str:
    """The profile of a seed: the one that was chosen, or for `each` one of all.

    Where there is one more profile it takes its share of the seeds, and all other seeds keep theirs (rendezvous
    hashing, Thaler and Ravishankar 1998): a schedule that failed once is tried again by the next torture.
    """
    return max(PROFILES, key=lambda name: sha256(f"{name}:{seed}".encode()).digest()) if choice == "each" else choice


def attempt(run: Run) -> Failure | None:
    """Do it all; None when every invariant held. Whatever a core raises is a finding, and no end is one too."""
    try:
        with _cpu_limit():
            run.run()
    except Exception as error:  # noqa: BLE001  (see above)
        where = "".join(traceback.format_exception(error, limit=-8))
        return Failure(f"{type(error).__name__}: {error}", run.world.loop.now(), where)
    return None


def ease_collector() -> None:
    """For a process that runs many schedules: a world is one big cycle of references, and to look for it every few
    hundred allocations costs a sixth of all time."""
    gc.set_threshold(50_000, 10, 10)


def try_plan(schedule: Schedule, check_every: int = 64) -> Failure | None:
    """Run a schedule without a trace."""
    return attempt(Run(schedule, check_every))


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """Violation in the middle of whatever takes more CPU time than a schedule ever may. Main thread only."""

    def stop(_: int, __: FrameType | None) -> None:
        raise Violation(f"it does not end: {CPU_LIMIT_S} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
