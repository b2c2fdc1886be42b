"""Shrinks a failing schedule: removes whatever it does not need to fail in the same way. Deterministic.

Events first, by delta debugging (Zeller and Hildebrandt 2002, ddmin); then hosts, network and damage; then the values
of each event; repeated until nothing more can be removed. Two failures are the same when their `Failure.kind` is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import asdict, replace

from kvferry.ops.simulate.network import Delays
from tests.simulation.schedule import (
    Ask,
    Crash,
    Cut,
    Drain,
    Freeze,
    Incompatible,
    Schedule,
    ScheduledEvent,
    Slow,
    Stall,
    Wedge,
)
from tests.simulation.trial import Failure, try_schedule

MAX_RUNS = 600


@dataclass(slots=True)
class Shrinker:
    """Shrinks one failing schedule. `fails` returns the failure of a schedule, or None."""

    schedule: Schedule
    failure: Failure
    fails: Callable[[Schedule], Failure | None] = try_schedule
    max_runs: int = MAX_RUNS
    num_runs: int = 0
    _steps: tuple[Callable[[], bool], ...] = field(init=False)

    def __post_init__(self) -> None:
        self._steps = (self._fewer_events, self._simpler_world, self._simpler_events)

    def run(self) -> Schedule:
        """Return the shortest schedule found; `failure` is its failure."""
        while self.num_runs < self.max_runs and sum(step() for step in self._steps):
            pass
        return self.schedule

    def _accept(self, schedule: Schedule) -> bool:
        """Continue from this schedule if it fails in the same way; whether it does."""
        if self.num_runs >= self.max_runs or schedule == self.schedule:
            return False
        self.num_runs += 1
        failure = self.fails(schedule)
        if failure is None or failure.kind != self.failure.kind:
            return False
        self.schedule, self.failure = schedule, failure
        return True

    def _fewer_events(self) -> bool:
        """Remove parts of the events: halves first, single events last."""
        before, parts = len(self.schedule.events), 2
        while self.schedule.events and self.num_runs < self.max_runs:
            events = self.schedule.events
            size = -(-len(events) // parts)
            starts = range(0, len(events), size)
            if any(self._accept(replace(self.schedule, events=events[:at] + events[at + size :])) for at in starts):
                parts = max(2, parts - 1)
            elif size == 1:
                break
            else:
                parts = min(len(events), 2 * parts)
        return len(self.schedule.events) < before

    def _simpler_world(self) -> bool:
        return sum(self._accept(schedule) for schedule in self._simpler_worlds()) > 0

    def _simpler_worlds(self) -> Iterator[Schedule]:
        """Yield simplifications, each of the schedule at the time of the yield."""
        hosts = [spec.name for spec in self.schedule.nodes] + [spec.name for spec in self.schedule.workers]
        for host in hosts:
            yield _without(self.schedule, host)
        yield replace(self.schedule, delays=Delays())
        yield replace(self.schedule, piece_delay_s=0.0005)
        yield replace(self.schedule, damaged_share=0.0)
        yield replace(self.schedule, static=True)

    def _simpler_events(self) -> bool:
        accepted = 0
        for place in range(len(self.schedule.events)):
            for name, values in _SIMPLER.get(type(self.schedule.events[place]), {}).items():
                accepted += any(self._accept(self._with(place, name, value)) for value in values)
            if isinstance(event := self.schedule.events[place], Ask) and len(event.prompt) > 1:
                halves = (event.prompt[:1], event.prompt[: len(event.prompt) // 2])
                accepted += any(self._accept(self._with(place, "prompt", half)) for half in halves)
        return accepted > 0

    def _with(self, place: int, name: str, value: object) -> Schedule:
        """Return the schedule with one value of one event changed, if that makes it simpler."""
        events = list(self.schedule.events)
        current: object = asdict(events[place])[name]
        simpler = not isinstance(current, int | float) or not isinstance(value, int | float) or value < current
        if simpler or name in ("timeout_s", "priority"):
            events[place] = replace(events[place], **{name: value})
        return replace(self.schedule, events=tuple(events))


_SIMPLER: dict[type[ScheduledEvent], dict[str, Sequence[object]]] = {
    Ask: {
        "max_new_tokens": (1, 2, 4, 8),
        "priority": (5,),
        "timeout_s": (20.0,),
        "poisoned": (False,),
        "kills": (False,),
    },
    Crash: {"after_actions": (0,), "restart_s": (0.05, 0.5)},
    Drain: {"restart_s": (0.05,)},
    Freeze: {"duration_s": (0.2, 1.2)},
    Stall: {"duration_s": (0.2, 1.2)},
    Incompatible: {"duration_s": (0.2, 1.2)},
    Wedge: {"restart_s": (1.0,)},
    Cut: {"duration_s": (0.2, 1.2), "kv": (False,)},
    Slow: {"extra_s": (0.05,), "duration_s": (0.5,)},
}
"""Values to try for each kind of event, simplest first."""


def _without(schedule: Schedule, host: str) -> Schedule:
    """Return the schedule without a host and its events, or the same schedule when the host is required."""
    nodes = tuple(spec for spec in schedule.nodes if spec.name != host)
    workers = tuple(spec for spec in schedule.workers if spec.name != host)
    roles = {role for spec in nodes if spec.name not in schedule.incompatible for role in spec.roles}
    if not workers or roles != {"prefill", "decode"}:
        return schedule
    events = tuple(event for event in schedule.events if host not in asdict(event).values())
    incompatible = {name: field for name, field in schedule.incompatible.items() if name != host}
    return replace(schedule, nodes=nodes, workers=workers, events=events, incompatible=incompatible)


def shrink(schedule: Schedule, failure: Failure) -> tuple[Schedule, Failure]:
    """Return the shortest schedule found, and its failure."""
    shrinker = Shrinker(schedule, failure)
    return shrinker.run(), shrinker.failure


def describe(schedule: Schedule) -> Iterator[str]:
    """Return a schedule as readable lines."""
    hosts = [f"{spec.name} ({'+'.join(spec.roles)}, {spec.num_blocks} blocks)" for spec in schedule.nodes]
    yield f"{', '.join(spec.name for spec in schedule.workers)}; {', '.join(hosts)}; {schedule.delays}"
    yield from (f"{name} is incompatible: {field}" for name, field in schedule.incompatible.items())
    for event in schedule.events:
        values = ", ".join(
            f"{name} {_short(value)}" for name, value in asdict(event).items() if name not in ("at", "seed")
        )
        yield f"  {event.at:7.3f} s  {type(event).__name__}: {values}"


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"of {len(value)} ids" if isinstance(value, tuple) else str(value)
