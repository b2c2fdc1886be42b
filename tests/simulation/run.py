"""Carries out a schedule and judges it. Deterministic: the same plan gives the same events, in the same order."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import InvariantError
from common.sampling_params import SamplingParams
from ops.simulate.node import SimNode
from ops.simulate.process import Process
from ops.simulate.worker import SimWorker, Stream
from ops.simulate.world import World
from router.api import StreamEvent
from tests.simulation.checks import StreamJudge, Violation, judge_notice, judge_quiet
from tests.simulation.plan import Ask, Blip, Crash, Cut, Deed, Drain, Freeze, Leave, Plan, Slow, Wedge
from tests.simulation.watch import Watch

NOTICE_S = 3.0
"""After the end of a node, until no request waits there any more."""
RECOVERY_S = 3.2
"""After the last fault is over, until the cluster must serve again: links time out, connect anew, are heard."""
QUIET_S = 2.2
"""After the last request ended, until nothing may be held any more: a list, and a slow message or two."""
POLL_S = 0.25
PROBE_PROMPT = (5, 6, 7, 8, 9)


@dataclass(slots=True)
class Run:
    """One schedule in the making."""

    plan: Plan
    check_every: int = 64
    trace: Callable[[Process, object], None] | None = None
    world: World = field(init=False)
    judges: dict[int, StreamJudge] = field(default_factory=dict)
    calm_at: float = 0.0
    """When the last fault is over, as far as that is known."""
    counts: Counter[str] = field(default_factory=Counter)
    watch: Watch = field(init=False)
    _by_stream: dict[str, StreamJudge] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch = Watch(self.trace, clock_slack_s=0.01 + self._frozen_s())
        self.world = World(
            self.plan.seed,
            timers=self.plan.workers[0].timers,
            delays=self.plan.delays,
            static=self.plan.static,
            check_every=self.check_every,
            trace=self.watch.look,
            on_new_process=self._new_process,
        )
        self.world.kv.damaged_share = self.plan.damaged_share

    def run(self) -> Counter[str]:
        """Do it all. Raises Violation, or whatever a core raises."""
        world, loop = self.world, self.world.loop
        for node in self.plan.nodes:
            world.start_node(node)
        for worker in self.plan.workers:
            world.start_worker(worker)
        for deed in self.plan.deeds:
            loop.at(deed.at, self._do, deed)
        last = max((deed.at for deed in self.plan.deeds), default=0.0)
        loop.run_until(last)
        self._run_to_calm()
        loop.run_until(max(loop.now(), self.calm_at) + RECOVERY_S)
        self._probe_all()
        self._run_to_end()
        self._run_to_quiet()
        return self.counts

    # -- deeds

    def _do(self, deed: Deed) -> None:
        world, now = self.world, self.world.loop.now()
        if not isinstance(deed, Ask | Leave):
            self._later(0.0)
        match deed:
            case Ask():
                self._ask(deed)
            case Leave(_, number):
                judge = self.judges.get(number)
                if judge is not None:
                    judge.may_leave_at = now
                    judge.stream.worker.leave(judge.stream)
            case Crash(_, host, after_actions, restart_s):
                process = self._process(host)
                if process is not None:
                    process.crash_after_actions = after_actions
                    world.loop.after(0.5, self._crash_now, process)
                    self._later(0.5 + restart_s)
                    world.loop.after(0.5 + restart_s, self._restart, process)
            case Drain(_, host, restart_s):
                process = self._process(host)
                if isinstance(process, SimNode | SimWorker):
                    process.drain()
                    self._watch_drain(process, restart_s, now)
            case Freeze(_, host, duration_s):
                process = self._process(host)
                if process is not None and not process.frozen:
                    process.freeze()
                    others = self._frozen_s() - duration_s
                    world.loop.after(NOTICE_S + others + self._slowest_s, self._check_notice, process)
                    self._later(duration_s)
                    world.loop.after(duration_s, process.thaw)
            case Wedge(_, host, restart_s):
                process = self._process(host)
                if isinstance(process, SimNode):
                    process.wedge()
                    self._later(restart_s)
                    world.loop.after(restart_s, self._unwedge, process)
            case Blip(_, host_a, host_b, kv):
                (world.kv if kv else world.network).blip(host_a, host_b)
            case Cut(_, from_host, to_host, duration_s, kv):
                (world.kv if kv else world.network).cut(from_host, to_host, duration_s)
                self._later(duration_s)
            case Slow(_, host, extra_s, duration_s):
                world.network.slow_hosts[host] = extra_s
                self._later(duration_s)
                world.loop.after(duration_s, world.network.speed_up, host)

    def _later(self, seconds: float) -> None:
        self.calm_at = max(self.calm_at, self.world.loop.now() + seconds)

    def _process(self, host: str) -> Process | None:
        process = self.world.workers.get(host) or self.world.nodes.get(host)
        return process if process is not None and process.alive else None

    def _ask(self, ask: Ask) -> None:
        worker = self.world.workers[ask.worker]
        if not worker.alive:
            return
        sampling = SamplingParams(max_new_tokens=ask.max_new_tokens, seed=ask.seed, do_sample=True)
        stream = self.world.send_request(worker, ask.prompt, sampling, priority=ask.priority, timeout_s=ask.timeout_s)
        judge = StreamJudge(stream, ask.poisoned, slack_s=self._frozen_s() + 0.5)
        self.judges[ask.number] = self._by_stream[stream.request.request_id] = judge

    def _crash_now(self, process: Process) -> None:
        process.end("crash")

    def _restart(self, process: Process) -> None:
        latest = self.world.workers.get(process.host) or self.world.nodes.get(process.host)
        if latest is process and not process.alive:
            self.world.restart(process)

    def _unwedge(self, process: SimNode) -> None:
        process.end("wedged")
        self._restart(process)

    def _watch_drain(self, process: SimNode | SimWorker, restart_s: float, since: float) -> None:
        loop = self.world.loop
        timers = process.spec.timers
        bound = timers.node_drain_s + 2 * timers.dead_after_s if isinstance(process, SimNode) else timers.worker_drain_s
        self._later(restart_s + POLL_S)
        if not process.alive:
            loop.after(restart_s, self._restart, process)
        elif loop.now() - since > bound + 1.0 + self._frozen_s():
            raise Violation(f"{process.host} has not ended {loop.now() - since:.1f} s after SIGTERM")
        else:
            loop.after(POLL_S, self._watch_drain, process, restart_s, since)

    def _frozen_s(self) -> float:
        return sum(deed.duration_s for deed in self.plan.deeds if isinstance(deed, Freeze))

    # -- watching

    def _new_process(self, process: Process) -> None:
        process.on_end = self._ended
        if isinstance(process, SimWorker):
            process.on_stream_event = self._on_stream_event

    def _ended(self, process: Process, why: str) -> None:
        """A node that is gone is noticed in time by all workers that are awake."""
        if isinstance(process, SimNode):
            self.world.loop.after(NOTICE_S + self._frozen_s() + self._slowest_s, self._check_notice, process)

    def _check_notice(self, gone: Process) -> None:
        complaint = judge_notice(self.world, gone) if gone.frozen or not gone.alive else None
        if complaint is not None:
            raise Violation(complaint)

    @property
    def _slowest_s(self) -> float:
        """A message that was sent before an end may come this much later."""
        slow = [deed.extra_s for deed in self.plan.deeds if isinstance(deed, Slow)]
        delays = self.plan.delays
        return 0.9 + delays.base_s + delays.jitter_s + delays.slow_s + 2 * max(slow, default=0.0)

    def _on_stream_event(self, stream: Stream, event: StreamEvent) -> None:
        self._by_stream[stream.request.request_id].take(event, self.world.loop.now())

    # -- phases after the last deed

    def _run_to_calm(self) -> None:
        loop = self.world.loop
        while loop.now() < self.calm_at:
            loop.run_until(min(self.calm_at, loop.now() + 1.0))
        for process in [*self.world.nodes.values(), *self.world.workers.values()]:
            if not process.alive:
                self._restart(process)

    def _probe_all(self) -> None:
        """Whatever happened before: now every worker serves again."""
        for number, worker in enumerate(self.world.workers.values()):
            self._ask_probe(number, worker)

    def _ask_probe(self, number: int, worker: SimWorker) -> None:
        sampling = SamplingParams(max_new_tokens=3, seed=number, do_sample=True)
        stream = self.world.send_request(worker, PROBE_PROMPT, sampling, priority=1, timeout_s=6.0)
        judge = StreamJudge(stream, poisoned=False, must_succeed=True, slack_s=self._frozen_s() + 0.5)
        self.judges[-1 - number] = self._by_stream[stream.request.request_id] = judge

    def _run_to_end(self) -> None:
        loop = self.world.loop
        while any(not judge.stream.over for judge in self.judges.values()):
            loop.run_until(loop.now() + POLL_S)
            for judge in self.judges.values():
                if not judge.stream.over:
                    judge.check_time(loop.now())
        for judge in self.judges.values():
            self._watch_calm()
            self.counts[judge.verdict(troubled=self.plan.troubled, calm_at=self.calm_at)] += 1

    def _watch_calm(self) -> None:
        """Without faults nothing is lost on the way: no attempt ends that the worker did not end."""
        for what in self.watch.counts if not self.plan.troubled else ():
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


def run_plan(
    plan: Plan, *, check_every: int = 64, trace: Callable[[Process, object], None] | None = None
) -> Counter[str]:
    """Run it; what came out is counted. Raises Violation, InvariantError or whatever else went wrong."""
    return Run(plan, check_every, trace).run()


FAILURES = (Violation, InvariantError, AssertionError, KeyError, TypeError, ValueError, IndexError, AttributeError)
