"""The launcher's state machine: which child to start, stop or kill, and when to finish. Pure: no process, no clock.

    STARTING --ReadySeen--> READY
    STARTING, READY --StopRequested--> STOPPING   stage by stage: routers, prefill, decode, proxy
    STARTING --a child exits with an error--> STOPPING, and the launcher's exit code is 1 or 2
    STOPPING --StopRequested--> KILLING           all children at the same time
    STOPPING, KILLING --the last child exits--> OVER

A child that is killed by a signal in STARTING, or that exits in READY for any reason, is restarted after the wait of
its restart policy.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.common.base.errors import InvariantError
from kvferry.ops.cli.errors import USAGE_ERROR
from kvferry.ops.launcher.restart_policy import RestartLimits, RestartPolicy

_START_CRASHES_MAX = 5
_ERROR_LINE = re.compile(r"kvferry [a-z]+: error: (.+)")


class Stage(Enum):
    """The order in which children are stopped."""

    ROUTER = 0
    PREFILL = 1
    DECODE = 2
    PROXY = 3


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """One child, as far as the core needs it."""

    name: str
    stage: Stage
    stop_timeout_s: float
    """Seconds from SIGTERM until it is killed."""


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A child exited. `code` is negative for a signal; `last_line` is the last line that it wrote. If that is an error
    line of a kvferry command, it has not been printed yet."""

    name: str
    code: int
    last_line: str = ""


@dataclass(frozen=True, slots=True)
class ReadySeen:
    """The cluster can serve a request."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user asked to stop: Ctrl-C, SIGTERM."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `next_wakeup` has come."""


Event = ChildExited | ReadySeen | StopRequested | Tick


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start a child that does not run."""

    name: str


@dataclass(frozen=True, slots=True)
class TerminateChild:
    """Send SIGTERM."""

    name: str


@dataclass(frozen=True, slots=True)
class KillChild:
    """Kill the child and its process group."""

    name: str


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    """Print the line that reports that requests are served."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """Write a line to the log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class FinishLaunch:
    """All children have exited. `error` is empty after an orderly stop."""

    error: str = ""
    is_usage_error: bool = False
    """The configuration is wrong: a child ended with exit code 2."""


Action = StartChild | TerminateChild | KillChild | AnnounceReady | LogLine | FinishLaunch


class Phase(Enum):
    """State of the launcher."""

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
    """Decides for a fixed set of children. The caller must pass every event with its time and perform the actions in
    their order."""

    def __init__(self, children: Sequence[ChildPlan], limits: RestartLimits) -> None:
        if len({plan.name for plan in children}) != len(children):
            raise InvariantError("two children have the same name")
        self._children = {plan.name: _Child(plan, limits) for plan in children}
        self._phase = Phase.STARTING
        self._stage_stopping: Stage | None = None
        self._error = ""
        self._is_usage_error = False

    @property
    def phase(self) -> Phase:
        return self._phase

    def begin(self, now: float) -> list[Action]:
        """Start all children."""
        return [self._start(child, now) for child in self._children.values()]

    def handle(self, event: Event, now: float) -> list[Action]:
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
            case _:  # ready after the stop began
                return []

    def next_wakeup(self) -> float | None:
        """Time of the next Tick; None if no timer runs."""
        times = [time for child in self._children.values() for time in (child.restart_at, child.kill_at)]
        return min((time for time in times if time is not None), default=None)

    def check_invariants(self) -> None:
        """Raise InvariantError if a child is in two states, or runs after the end."""
        for name, child in self._children.items():
            child.policy.check_invariants()
            if child.running and child.restart_at is not None:
                raise InvariantError(f"{name} runs and waits for a restart")
            if child.kill_at is not None and not child.running:
                raise InvariantError(f"{name} has a kill timer but does not run")
            if self._phase in (Phase.STOPPING, Phase.KILLING, Phase.OVER) and child.restart_at is not None:
                raise InvariantError(f"{name} waits for a restart after the stop")
        if self._phase is Phase.OVER and any(child.running for child in self._children.values()):
            raise InvariantError("the launcher is over, but a child runs")

    def _start(self, child: _Child, now: float) -> Action:
        child.running, child.restart_at = True, None
        child.policy.started(now)
        return StartChild(child.plan.name)

    def _child_exited(self, event: ChildExited, now: float) -> list[Action]:
        child = self._children[event.name]
        if not child.running:
            raise InvariantError(f"{event.name} exited twice")
        child.running, child.kill_at = False, None
        error = error_of_line(event.last_line)
        if self._phase in (Phase.STOPPING, Phase.KILLING):
            # Children of one configuration fail for the same reason: the reason in the launcher's own error is not
            # repeated for each of them.
            is_new = bool(error) and not self._error.endswith(error)
            return [*([LogLine(f"{event.name}: {error}", warning=True)] if is_new else []), *self._next_stage(now)]
        restart_at = child.policy.died(now)
        if self._phase is Phase.STARTING and (event.code > 0 or child.policy.quick_deaths >= _START_CRASHES_MAX):
            self._error = f"{event.name} could not start: {error or event.last_line or _how(event.code)}"
            self._is_usage_error = event.code == USAGE_ERROR
            return self._begin_stop(now)
        child.restart_at = restart_at
        how = _how(event.code) + (f": {error}" if error else "")
        return [LogLine(f"{event.name} {how}; restarting it in {restart_at - now:.1f} s", warning=True)]

    def _stop_requested(self, now: float) -> list[Action]:
        if self._phase in (Phase.STARTING, Phase.READY):
            return [LogLine("stopping; repeat to stop without draining"), *self._begin_stop(now)]
        if self._phase is Phase.STOPPING:
            self._phase = Phase.KILLING
            self._error = self._error or "stopped before all children had drained"
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
        """Stop the next stage once no child of the current one runs."""
        living = [child for child in self._children.values() if child.running]
        if not living:
            self._phase = Phase.OVER
            return [FinishLaunch(self._error, self._is_usage_error)]
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
                actions += [
                    LogLine(f"{name} did not stop in {child.plan.stop_timeout_s:g} s; killing it", warning=True)
                ]
                actions.append(KillChild(name))
        return actions


def error_of_line(line: str) -> str:
    """The message of an error line of a kvferry command (`kvferry NAME: error: MESSAGE`); empty for any other line."""
    match = _ERROR_LINE.fullmatch(line)
    return match[1] if match else ""


def _how(code: int) -> str:
    if code == -signal.SIGBUS:
        return "was killed by SIGBUS: a file that it maps (weights?) was truncated while in use"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
