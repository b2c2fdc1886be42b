"""Carries out a schedule and judges it. Deterministic: the same schedule gives the same events, in the same order."""

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
    StreamJudge,
    Violation,
    judge_notice,
    judge_quiet,
    judge_rested,
)
from tests.simulation.faults import POLL_S, Faults
from tests.simulation.monitor import Monitor
from tests.simulation.schedule import Ask, Leave, Schedule, ScheduledEvent

QUIET_S = 2.2
"""After the last request ended, until nothing may be held any more: a list, and a slow message or two."""
PROBE_PROMPT = (5, 6, 7, 8, 9)
PROBE_MARGIN_S = 0.1
"""A probe that waits for nodes is refused this long after they must be there, if at all."""


@dataclass(slots=True)
class Run:
    """One schedule in the making."""

    schedule: Schedule
    check_every: int = 64
    trace: Callable[[Process, object], None] | None = None
    world: World = field(init=False)
    judges: dict[int, StreamJudge] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """How requests ended."""
    monitor: Monitor = field(init=False)
    faults: Faults = field(init=False)
    _by_stream: dict[str, StreamJudge] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.monitor = Monitor(self.trace)
        self.world = World(
            self.schedule.seed,
            timers=self.schedule.workers[0].timers,
            delays=self.schedule.delays,
            static=self.schedule.static,
            check_every=self.check_every,
            trace=self.monitor.look,
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
        """Do it all. Raises Violation, or whatever a core raises."""
        world, loop = self.world, self.world.loop
        for node in self.schedule.nodes:
            world.start_node(node)
        for worker in self.schedule.workers:
            world.start_worker(worker)
        for event in self.schedule.events:
            loop.at(event.at, self._do, event)
        last = max((event.at for event in self.schedule.events), default=0.0)
        loop.run_until(last)
        self.faults.end_late_writes()
        self._run_to_recovery()
        self._probe_all(must_succeed=True)
        self._run_to_end()
        self._run_to_quiet()
        self._run_to_rested()
        return self.counts

    # -- events

    def _do(self, event: ScheduledEvent) -> None:
        match event:
            case Ask():
                self._ask(event)
            case Leave(_, number):
                self._leave(number)
            case _:
                self.faults.do(event)

    def _ask(self, ask: Ask) -> None:
        worker = self.world.workers[ask.worker]
        if not worker.alive:
            return
        sampling = SamplingParams(max_new_tokens=ask.max_new_tokens, seed=ask.seed, do_sample=True)
        stream = self.world.send_request(worker, ask.prompt, sampling, priority=ask.priority, timeout_s=ask.timeout_s)
        if worker.core.draining_since is not None and stream.refused is None and not worker.asleep:
            raise Violation(f"{ask.worker} drains and takes a request")
        accepted = worker.core.draining_since is None and MODEL_NAME in worker.core.models
        if accepted and isinstance(stream.refused, UnavailableError):
            raise Violation(f"{ask.worker} refuses a request that could wait: {stream.refused}")
        slow = any(node.costs.step_s > SLOW_STEP_S for node in self.schedule.nodes)
        judge = StreamJudge(
            stream, ask.poisoned, slack_s=self.faults.frozen_s + 0.5, slow_engine=slow, weights=self.schedule.weights
        )
        self.judges[ask.number] = self._by_stream[stream.request.request_id] = judge

    def _leave(self, number: int) -> None:
        judge = self.judges.get(number)
        if judge is not None:
            self.faults.counts["client leaves"] += not judge.stream.over
            judge.may_leave_at = self.world.loop.now()
            judge.stream.worker.leave(judge.stream)

    # -- watching

    def _new_process(self, process: Process) -> None:
        process.on_end = self._ended
        if isinstance(process, SimWorker):
            process.on_stream_event = self._on_stream_event

    def _ended(self, process: Process, why: str) -> None:
        """A node that is gone is noticed in time by all workers that are awake."""
        self.faults.counts[f"end: {why}"] += 1
        if isinstance(process, SimNode):
            self.world.loop.after(self.faults.notice_s, self._check_notice, process)
            if process.killed_by is not None:
                self.faults.killed(process, process.killed_by)

    def _check_notice(self, gone: Process) -> None:
        still = gone.asleep or not gone.alive
        complaint = judge_notice(self.world, gone, self.faults.notice_awake_s) if still else None
        if complaint is not None:
            raise Violation(complaint)

    def _on_stream_event(self, stream: SimulatedStream, event: StreamEvent) -> None:
        self._by_stream[stream.request.request_id].take(event, self.world.loop.now())

    # -- phases after the last event

    def _run_to_recovery(self) -> None:
        """Until all was calm for RECOVERY_S. A request that ends its node may have come late, and do so even now: then
        there is a last fault again."""
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
        """Whatever happened before: now every worker serves again, or will while a new request waits for nodes."""
        for number, worker in enumerate(self.world.workers.values()):
            self._ask_probe(number, worker, must_succeed)

    def _ask_probe(self, number: int, worker: SimWorker, must_succeed: bool) -> None:
        sampling = SamplingParams(max_new_tokens=3, seed=number, do_sample=True)
        stream = self.world.send_request(worker, PROBE_PROMPT, sampling, priority=1, timeout_s=6.0)
        slack_s = self.faults.frozen_s + 0.5
        weights = self.schedule.weights
        judge = StreamJudge(stream, poisoned=False, must_succeed=must_succeed, slack_s=slack_s, weights=weights)
        self.judges[-1 - len(self.judges)] = self._by_stream[stream.request.request_id] = judge

    def _run_to_end(self) -> None:
        loop = self.world.loop
        while any(not judge.stream.over for judge in self.judges.values()):
            loop.run_until(loop.now() + POLL_S)
            for judge in self.judges.values():
                if not judge.stream.over:
                    judge.check_time(loop.now())
        for judge in self.judges.values():
            self._watch_calm()
            damaged_at = self.world.kv.damaged_at.get(judge.stream.request.request_id, 0.0)
            calm_at = max(self.faults.calm_at, damaged_at)
            self.counts[judge.verdict(troubled=self.schedule.troubled, calm_at=calm_at)] += 1

    def _watch_calm(self) -> None:
        """Without faults nothing is lost on the way: no attempt ends that the worker did not end."""
        for what in self.monitor.counts if not self.schedule.troubled else ():
            if what.startswith("Gone lost") or what == "HandoverFailed lost":
                raise Violation(f"without any fault: {what}")

    def _run_to_quiet(self) -> None:
        loop, since = self.world.loop, self.world.loop.now()
        while True:
            complaint = judge_quiet(self.world)
            if complaint is None:
                break
            if loop.now() - since > QUIET_S:
                raise Violation(f"not quiet {QUIET_S} s after the last end: {complaint}")
            loop.run_until(loop.now() + POLL_S)
        self.counts[f"quiet after {loop.now() - since:.2f} s"] += 1
        for process in self.world.processes():
            process.check_invariants()

    def _run_to_rested(self) -> None:
        """Staging slots of senders that died may rest longer than anything else is held."""
        loop, timers = self.world.loop, self.schedule.workers[0].timers
        until = loop.now() + timers.client_timeout_s + timers.quarantine_s + QUIET_S
        while judge_rested(self.world) is not None and loop.now() < until:
            loop.run_until(loop.now() + POLL_S)
        complaint = judge_rested(self.world)
        if complaint is not None:
            raise Violation(complaint)


def run_schedule(
    schedule: Schedule, *, check_every: int = 64, trace: Callable[[Process, object], None] | None = None
) -> Counter[str]:
    """Run it; what came out is counted. Raises Violation, InvariantError or whatever else went wrong."""
    return Run(schedule, check_every, trace).run()
