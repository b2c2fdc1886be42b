"""What the launcher decides: which child to start, stop or kill, and when all is over. Pure: no process, no clock.

    STARTING --ReadySeen--> READY
    STARTING, READY --StopRequested--> STOPPING   stage by stage: routers, prefill, decode, proxy
    STARTING --a child ends by itself with an error--> STOPPING, and the exit code is 1
    STOPPING --StopRequested--> KILLING           everything at once
    STOPPING, KILLING --the last child is gone--> OVER

A child that dies in STARTING by a signal, or in READY in any way, is started again after its policy's wait.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.common.base.errors import InvariantError
from kvferry.ops.launcher.restart_policy import RestartLimits, RestartPolicy
from kvferry.ops.launcher.startup_error import startup_error

_START_CRASHES_MAX = 5
_WRONG_USE = 2


class Stage(Enum):
    """The order in which children are stopped."""

    ROUTER = 0
    PREFILL = 1
    DECODE = 2
    PROXY = 3


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """What the core knows of a child."""

    name: str
    stage: Stage
    stop_timeout_s: float
    """How long an orderly stop may take before it is killed."""


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A child is gone. `code` is negative for a signal; `last_line` is the last that it wrote. Where that says why it
    ended, nobody was shown it yet."""

    name: str
    code: int
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class ReadySeen:
    """A request would be served now."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants an end: Ctrl-C, SIGTERM."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by."""


Event = ChildExited | ReadySeen | StopRequested | Tick


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start it; it does not run."""

    name: str


@dataclass(frozen=True, slots=True)
class TerminateChild:
    """Ask it to stop (SIGTERM)."""

    name: str


@dataclass(frozen=True, slots=True)
class KillChild:
    """Kill it and its own children."""

    name: str


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    """Tell the user that requests are served."""


@dataclass(frozen=True, slots=True)
class Tell:
    """A line for the log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class FinishLaunch:
    """All children are gone. `error` is empty when all went as wanted."""

    error: str = ""
    wrong_use: bool = False
    """The error is one of the configuration: a child said so by its exit code."""


Action = StartChild | TerminateChild | KillChild | AnnounceReady | Tell | FinishLaunch


class Phase(Enum):
    """Where the launcher is."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    KILLING = "killing"
    OVER = "over"


class _Child:
    def __init__(self, plan: ChildPlan, limits: RestartLimits) -> None:
        self.plan = plan
        self.policy = RestartPolicy(limits)
        self.running = False
        self.restart_at: float | None = None
        self.kill_at: float | None = None


class LauncherCore:
    """Decides over a fixed set of children. Feed every event with its time; perform the actions in their order."""

    def __init__(self, children: Sequence[ChildPlan], limits: RestartLimits) -> None:
        if len({plan.name for plan in children}) != len(children):
            raise InvariantError("two children of one name")
        self._children = {plan.name: _Child(plan, limits) for plan in children}
        self._phase = Phase.STARTING
        self._stage_stopping: Stage | None = None
        self._error = ""
        self._wrong_use = False

    @property
    def phase(self) -> Phase:
        """Where the launcher is."""
        return self._phase

    def begin(self, now: float) -> list[Action]:
        """Start everything."""
        return [self._start(child, now) for child in self._children.values()]

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about an event."""
        match event:
            case ReadySeen() if self._phase is Phase.STARTING:
                self._phase = Phase.READY
                return [AnnounceReady()]
            case StopRequested():
                return self._stop_requested(now)
            case ChildExited():
                return self._child_exited(event, now)
            case Tick():
                return self._tick(now)
            case _:  # ready, but on the way out already
                return []

    def next_wakeup(self) -> float | None:
        """When a Tick is needed; None: only an event can change anything."""
        times = [time for child in self._children.values() for time in (child.restart_at, child.kill_at)]
        return min((time for time in times if time is not None), default=None)

    def check_invariants(self) -> None:
        """InvariantError when a child is in two states at once or runs after the end."""
        for name, child in self._children.items():
            child.policy.check_invariants()
            if child.running and child.restart_at is not None:
                raise InvariantError(f"{name} runs and waits for its start")
            if child.kill_at is not None and not child.running:
                raise InvariantError(f"{name} is to be killed and does not run")
            if self._phase in (Phase.STOPPING, Phase.KILLING, Phase.OVER) and child.restart_at is not None:
                raise InvariantError(f"{name} would start after the stop")
        if self._phase is Phase.OVER and any(child.running for child in self._children.values()):
            raise InvariantError("over, and a child runs")

    def _start(self, child: _Child, now: float) -> Action:
        child.running, child.restart_at = True, None
        child.policy.started(now)
        return StartChild(child.plan.name)

    def _child_exited(self, event: ChildExited, now: float) -> list[Action]:
        child = self._children[event.name]
        if not child.running:
            raise InvariantError(f"{event.name} ended twice")
        child.running, child.kill_at = False, None
        told = startup_error(event.last_line)
        if self._phase in (Phase.STOPPING, Phase.KILLING):
            # Children of one configuration fail alike: what ends the launcher's last line is not said for each.
            is_new = bool(told) and not self._error.endswith(told)
            return [*([Tell(f"{event.name}: {told}", warning=True)] if is_new else []), *self._next_stage(now)]
        restart_at = child.policy.died(now)
        if self._phase is Phase.STARTING and (event.code > 0 or child.policy.quick_deaths >= _START_CRASHES_MAX):
            self._error = f"{event.name} could not start: {told or event.last_line or _how(event.code)}"
            self._wrong_use = event.code == _WRONG_USE
            return self._begin_stop(now)
        child.restart_at = restart_at
        how = _how(event.code) + (f": {told}" if told else "")
        return [Tell(f"{event.name} {how}; starting it again in {restart_at - now:.1f} s", warning=True)]

    def _stop_requested(self, now: float) -> list[Action]:
        if self._phase in (Phase.STARTING, Phase.READY):
            return [Tell("stopping; again to stop at once"), *self._begin_stop(now)]
        if self._phase is Phase.STOPPING:
            self._phase = Phase.KILLING
            self._error = self._error or "stopped at once, before all had drained"
            living = [child for child in self._children.values() if child.running]
            for child in living:
                child.kill_at = None
            return [KillChild(child.plan.name) for child in living]
        return []

    def _begin_stop(self, now: float) -> list[Action]:
        self._phase = Phase.STOPPING
        for child in self._children.values():
            child.restart_at = None
        return self._next_stage(now)

    def _next_stage(self, now: float) -> list[Action]:
        """Go on when nothing of the stage that stops is left."""
        living = [child for child in self._children.values() if child.running]
        if not living:
            self._phase = Phase.OVER
            return [FinishLaunch(self._error, self._wrong_use)]
        first = min((child.plan.stage for child in living), key=lambda stage: stage.value)
        if self._phase is Phase.KILLING or first is self._stage_stopping:
            return []
        self._stage_stopping = first
        stopping = [child for child in living if child.plan.stage is first]
        for child in stopping:
            child.kill_at = now + child.plan.stop_timeout_s
        return [TerminateChild(child.plan.name) for child in stopping]

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for name, child in self._children.items():
            if child.restart_at is not None and child.restart_at <= now:
                actions.append(self._start(child, now))
            elif child.kill_at is not None and child.kill_at <= now:
                child.kill_at = None
                actions += [Tell(f"{name} did not stop in time and is killed", warning=True), KillChild(name)]
        return actions


def _how(code: int) -> str:
    if code == -signal.SIGBUS:
        return "was ended by SIGBUS: a file that it maps, a weights file perhaps, was cut while it was in use"
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
