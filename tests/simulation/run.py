"""Executes a schedule and checks its results. Deterministic: the same schedule gives the same events in order."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.common.base.errors import UnavailableError
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.ops.simulate.node import MODEL_NAME, SimNode
from kvferry.ops.simulate.process import Process
from kvferry.ops.simulate.worker import SimulatedStream, SimWorker
from kvferry.ops.simulate.world import World
from kvferry.router.api import StreamEvent
from tests.simulation.checks import (
    RECOVERY_S,
    SLOW_STEP_S,
    StreamChecker,
    Violation,
    find_unnoticed,
    find_unreleased,
    find_unreleased_slots,
)
from tests.simulation.faults import POLL_S, Faults
from tests.simulation.monitor import Monitor
from tests.simulation.schedule import Ask, Leave, Schedule, ScheduledEvent

QUIET_S = 2.2
"""Bound from the end of the last request until all resources are free: a heartbeat and slow messages."""
PROBE_PROMPT = (5, 6, 7, 8, 9)
PROBE_MARGIN_S = 0.1
"""A probe waits until this long after the nodes must be back."""


@dataclass(slots=True)
class Run:
    """One execution of a schedule."""

    schedule: Schedule
    check_every: int = 64
    trace: Callable[[Process, object], None] | None = None
    world: World = field(init=False)
    checkers: dict[int, StreamChecker] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Number of requests by how they ended."""
    monitor: Monitor = field(init=False)
    faults: Faults = field(init=False)
    _by_stream: dict[str, StreamChecker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.monitor = Monitor(self.trace)
        self.world = World(
            self.schedule.seed,
            timers=self.schedule.workers[0].timers,
            delays=self.schedule.delays,
            static=self.schedule.static,
            check_every=self.check_every,
            trace=self.monitor.observe,
            on_new_process=self._new_process,
        )
        self.world.kv.damaged_share = self.schedule.damaged_share
        self.world.kv.late_share = self.schedule.late_share
        self.world.kv.unconfirmed_share = self.schedule.unconfirmed_share
        self.world.kv.base_delay_s, self.world.kv.jitter_s = (
            self.schedule.piece_delay_s,
            2 * self.schedule.piece_delay_s,
        )
        self.faults = Faults(self.schedule, self.world, self._check_notice)
        self.faults.incompatible |= self.schedule.incompatible
        self.monitor.incompatible = self.faults.incompatible
        self.monitor.clock_slack_s += self.faults.frozen_s

    def run(self) -> Counter[str]:
        """Execute the schedule. Raises Violation, and any exception of a core."""
        world, loop = self.world, self.world.loop
        for node in self.schedule.nodes:
            world.start_node(node)
        for worker in self.schedule.workers:
            world.start_worker(worker)
        for event in self.schedule.events:
            loop.at(event.at, self._perform, event)
        last = max((event.at for event in self.schedule.events), default=0.0)
        loop.run_until(last)
        self.faults.end_late_writes()
        self._run_to_recovery()
        self._probe_all(must_succeed=True)
        self._run_to_end()
        self._run_to_quiet()
        self._run_to_slots_free()
        return self.counts

    # -- events

    def _perform(self, event: ScheduledEvent) -> None:
        match event:
            case Ask():
                self._ask(event)
            case Leave(_, number):
                self._leave(number)
            case _:
                self.faults.inject(event)

    def _ask(self, ask: Ask) -> None:
        worker = self.world.workers[ask.worker]
        if not worker.alive:
            return
        sampling = SamplingParams(max_new_tokens=ask.max_new_tokens, seed=ask.seed, do_sample=True)
        stream = self.world.send_request(worker, ask.prompt, sampling, priority=ask.priority, timeout_s=ask.timeout_s)
        if worker.core.draining_since is not None and stream.refused is None and not worker.asleep:
            raise Violation(f"{ask.worker} accepts a request while draining")
        may_wait = worker.core.draining_since is None and MODEL_NAME in worker.core.models
        if may_wait and isinstance(stream.refused, UnavailableError):
            raise Violation(f"{ask.worker} refuses a request that could wait: {stream.refused}")
        slow = any(node.costs.step_s > SLOW_STEP_S for node in self.schedule.nodes)
        checker = StreamChecker(
            stream, ask.poisoned, slack_s=self.faults.frozen_s + 0.5, slow_engine=slow, weights=self.schedule.weights
        )
        self.checkers[ask.number] = self._by_stream[stream.request.request_id] = checker

    def _leave(self, number: int) -> None:
        checker = self.checkers.get(number)
        if checker is not None:
            self.faults.counts["client leaves"] += not checker.stream.over
            checker.may_leave_at = self.world.loop.now()
            checker.stream.worker.leave(checker.stream)

    # -- observing

    def _new_process(self, process: Process) -> None:
        process.on_end = self._ended
        if isinstance(process, SimWorker):
            process.on_stream_event = self._on_stream_event

    def _ended(self, process: Process, why: str) -> None:
        """Schedule the check that every worker that is awake has noticed the end of a node."""
        self.faults.counts[f"end: {why}"] += 1
        if isinstance(process, SimNode):
            self.world.loop.after(self.faults.notice_s, self._check_notice, process)
            if process.killed_by is not None:
                self.faults.killed(process, process.killed_by)

    def _check_notice(self, gone: Process) -> None:
        still = gone.asleep or not gone.alive
        problem = find_unnoticed(self.world, gone, self.faults.notice_awake_s) if still else None
        if problem is not None:
            raise Violation(problem)

    def _on_stream_event(self, stream: SimulatedStream, event: StreamEvent) -> None:
        self._by_stream[stream.request.request_id].take(event, self.world.loop.now())

    # -- phases after the last event

    def _run_to_recovery(self) -> None:
        """Run until RECOVERY_S after the last fault. A request may crash a node as late as now, which is then the last
        fault."""
        loop = self.world.loop
        while True:
            self._run_to_calm()
            calm_at, served_at = self.faults.calm_at, loop.now() + RECOVERY_S
            loop.run_until(served_at - self.schedule.workers[0].timers.new_request_wait_s + PROBE_MARGIN_S)
            self._probe_all(must_succeed=False)
            loop.run_until(served_at)
            if self.faults.calm_at == calm_at:
                return

    def _run_to_calm(self) -> None:
        loop = self.world.loop
        while loop.now() < self.faults.calm_at:
            loop.run_until(min(self.faults.calm_at, loop.now() + 1.0))
        for process in [*self.world.nodes.values(), *self.world.workers.values()]:
            if not process.alive:
                self.faults.restart(process)

    def _probe_all(self, *, must_succeed: bool) -> None:
        """Send one probe request to every worker: each must serve it, or may wait for nodes if not `must_succeed`."""
        for number, worker in enumerate(self.world.workers.values()):
            self._ask_probe(number, worker, must_succeed)

    def _ask_probe(self, number: int, worker: SimWorker, must_succeed: bool) -> None:
        sampling = SamplingParams(max_new_tokens=3, seed=number, do_sample=True)
        stream = self.world.send_request(worker, PROBE_PROMPT, sampling, priority=1, timeout_s=6.0)
        slack_s = self.faults.frozen_s + 0.5
        weights = self.schedule.weights
        checker = StreamChecker(stream, poisoned=False, must_succeed=must_succeed, slack_s=slack_s, weights=weights)
        self.checkers[-1 - len(self.checkers)] = self._by_stream[stream.request.request_id] = checker

    def _run_to_end(self) -> None:
        loop = self.world.loop
        while any(not checker.stream.over for checker in self.checkers.values()):
            loop.run_until(loop.now() + POLL_S)
            for checker in self.checkers.values():
                if not checker.stream.over:
                    checker.check_time(loop.now())
        for checker in self.checkers.values():
            self._check_nothing_lost()
            damaged_at = self.world.kv.damaged_at.get(checker.stream.request.request_id, 0.0)
            calm_at = max(self.faults.calm_at, damaged_at)
            self.counts[checker.verdict(troubled=self.schedule.troubled, calm_at=calm_at)] += 1

    def _check_nothing_lost(self) -> None:
        """Without faults no attempt is lost."""
        for what in self.monitor.counts if not self.schedule.troubled else ():
            if what.startswith("Gone lost") or what == "HandoverFailed lost":
                raise Violation(f"without any fault: {what}")

    def _run_to_quiet(self) -> None:
        loop, since = self.world.loop, self.world.loop.now()
        while True:
            problem = find_unreleased(self.world)
            if problem is None:
                break
            if loop.now() - since > QUIET_S:
                raise Violation(f"not quiet {QUIET_S} s after the last end: {problem}")
            loop.run_until(loop.now() + POLL_S)
        self.counts[f"quiet after {loop.now() - since:.2f} s"] += 1
        for process in self.world.processes():
            process.check_invariants()

    def _run_to_slots_free(self) -> None:
        """Run until all staging slots are free; those of dead senders stay in quarantine for longest."""
        loop, timers = self.world.loop, self.schedule.workers[0].timers
        until = loop.now() + timers.client_timeout_s + timers.quarantine_s + QUIET_S
        while find_unreleased_slots(self.world) is not None and loop.now() < until:
            loop.run_until(loop.now() + POLL_S)
        problem = find_unreleased_slots(self.world)
        if problem is not None:
            raise Violation(problem)


def run_schedule(
    schedule: Schedule, *, check_every: int = 64, trace: Callable[[Process, object], None] | None = None
) -> Counter[str]:
    """Execute a schedule; return the number of requests by how they ended. Raises as `Run.run`."""
    return Run(schedule, check_every, trace).run()
