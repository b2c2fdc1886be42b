"""Carries out the faults of a schedule on a world, and knows when the last of them is over. Judges nothing."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.common.base.ids import RequestId
from kvferry.ops.simulate.kv_network import SEND_TIMEOUT_S
from kvferry.ops.simulate.network import Delays
from kvferry.ops.simulate.node import NodeSpec, SimNode
from kvferry.ops.simulate.process import Process
from kvferry.ops.simulate.worker import SimWorker
from kvferry.ops.simulate.world import World
from tests.simulation.checks import Violation, resting
from tests.simulation.plan import Ask, Blip, Crash, Cut, Deed, Drain, Freeze, Leave, Misfit, Plan, Slow, Stall, Wedge
from tests.simulation.strangers import strange

NOTICE_S = 3.0
"""After the end of a node, until no request waits there any more."""
CRASH_AT_MOST_S = 0.5
"""A process that is to die at its n-th action and does not come so far dies after this time."""
AFTER_WEDGE_S = 1.0
"""By then an engine that has work has some in its step, and that step does not end."""
AFTER_KILL_S = 4.0
"""By then a request that ended its node has ended the next one, if it is to end any."""
POLL_S = 0.25


@dataclass(slots=True)
class Faults:
    """What befalls the processes and the network of one schedule."""

    plan: Plan
    world: World
    check_notice: Callable[[Process], None]
    """Asked when nobody may rest on a process any more."""
    calm_at: float = 0.0
    """When the last fault is over, as far as that is known."""
    strangers: dict[str, str] = field(default_factory=dict)
    """Nodes that fit no other one now, and what is different about them."""
    _kills: Counter[int] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    """What happened: a deed that found nothing to do is not counted."""

    @property
    def frozen_s(self) -> float:
        """How long processes stand still, all in all."""
        return sum(deed.duration_s for deed in self.plan.deeds if isinstance(deed, Freeze | Stall))

    @property
    def notice_s(self) -> float:
        """After the end of a node: until everybody knows who is awake by then."""
        return self.notice_awake_s + self.frozen_s

    @property
    def notice_awake_s(self) -> float:
        """Until a process that sleeps no more knows, with the slowest message."""
        slow = [deed.extra_s for deed in self.plan.deeds if isinstance(deed, Slow)]
        delays = self.plan.delays
        slowest_s = 0.9 + delays.base_s + delays.jitter_s + delays.slow_s + 2 * max(slow, default=0.0)
        return NOTICE_S + slowest_s

    def do(self, deed: Deed) -> None:
        """Now."""
        self._later(0.0)
        match deed:
            case Crash(_, host, after_actions, restart_s):
                self._crash(host, after_actions, restart_s)
            case Drain(_, host, restart_s):
                process = self._process(host)
                if isinstance(process, SimNode | SimWorker):
                    self.counts["drain of a worker" if isinstance(process, SimWorker) else "drain of a node"] += 1
                    process.drain()
                    self._watch_drain(process, restart_s, self.world.loop.now())
            case Freeze(_, host, duration_s):
                self._freeze(host, duration_s)
            case Stall(_, host, duration_s):
                self._stall(host, duration_s)
            case Wedge(_, host, restart_s):
                process = self._process(host)
                if isinstance(process, SimNode):
                    self._wedge(process, restart_s)
            case Misfit(_, host, field, duration_s):
                self._misfit(host, field, duration_s)
            case Blip(_, host_a, host_b, kv):
                self.counts["KV connection broken" if kv else "connection broken"] += 1
                (self.world.kv if kv else self.world.network).blip(host_a, host_b)
            case Cut(_, from_host, to_host, duration_s, kv):
                (self.world.kv if kv else self.world.network).cut(from_host, to_host, duration_s)
                self._later(duration_s)
                self.world.loop.after(0.0, self._count_cut, deed)
            case Slow(_, host, extra_s, duration_s):
                self.counts["slow host"] += 1
                self.world.network.slow_hosts[host] = extra_s
                self._later(duration_s)
                self.world.loop.after(duration_s, self.world.network.speed_up, host)
            case Ask() | Leave():
                raise TypeError(f"{deed} is no fault")

    def end_late_writes(self) -> None:
        """From here on one-sided writes land at once and are confirmed; earlier ones may be under way for a while."""
        kv = self.world.kv
        if kv.late_share + kv.unconfirmed_share > 0:
            kv.late_share = kv.unconfirmed_share = 0.0
            self._later(SEND_TIMEOUT_S)

    def restart(self, process: Process) -> None:
        """A new life at the same address, unless there is one or the old one lives."""
        latest = self.world.workers.get(process.host) or self.world.nodes.get(process.host)
        if latest is process and not process.alive:
            self.counts["restart at the same address"] += 1
            self.world.restart(process)

    def killed(self, node: SimNode, seed: int) -> None:
        """A request ended its decode node: it may do so to crash_limit of them, no more. Where news is slow, or other
        things go wrong, not each of these deaths can be told from another loss, and max_attempts bounds them."""
        self._kills[seed] += 1
        limits = node.spec.limits
        plain = self.plan.delays == Delays() and not any(not isinstance(deed, Ask) for deed in self.plan.deeds)
        if self._kills[seed] > (limits.crash_limit if plain else limits.max_attempts):
            raise Violation(f"one request ended {self._kills[seed]} processes")
        self._later(AFTER_KILL_S)
        self.world.loop.after(0.5, self.restart, node)

    def total(self) -> Counter[str]:
        """All that befell, with what the network did by itself."""
        network, kv = self.world.network, self.world.kv
        own = {
            "message lost with its connection": network.num_lost,
            "message late after its connection": network.num_late,
            "message held by a cut": network.num_held,
            "piece lost": kv.num_lost,
            "piece damaged": kv.num_damaged,
            "one-sided write": kv.num_writes,
            "one-sided write after its hand-over": kv.num_late,
            "one-sided write without confirmation": kv.num_unconfirmed,
        }
        return self.counts + Counter(own)

    # -- one kind each

    def _later(self, seconds: float) -> None:
        self.calm_at = max(self.calm_at, self.world.loop.now() + seconds)

    def _process(self, host: str) -> Process | None:
        process = self.world.workers.get(host) or self.world.nodes.get(host)
        return process if process is not None and process.alive else None

    def _crash(self, host: str, after_actions: int, restart_s: float) -> None:
        process, loop = self._process(host), self.world.loop
        if process is not None:
            process.crash_after_actions = after_actions
            loop.after(CRASH_AT_MOST_S, process.end, "crash")
            self._later(CRASH_AT_MOST_S + restart_s)
            loop.after(CRASH_AT_MOST_S + restart_s, self.restart, process)

    def _freeze(self, host: str, duration_s: float) -> None:
        process, loop = self._process(host), self.world.loop
        if process is not None and not process.frozen:
            self.counts["freeze and thaw"] += 1
            process.freeze()
            self._notice_stillness(process, duration_s)
            self._later(duration_s)
            loop.after(duration_s, process.thaw)

    def _stall(self, host: str, duration_s: float) -> None:
        process = self._process(host)
        if process is not None and not process.stalled:
            self.counts["worker stalled" if isinstance(process, SimWorker) else "node stalled"] += 1
            process.stall()
            self._notice_stillness(process, duration_s)
            self._later(duration_s)
            self.world.loop.after(duration_s, process.end_stall)

    def _notice_stillness(self, process: Process, duration_s: float) -> None:
        """Nobody may rest on who stands still for so long that all must have noticed."""
        within_s = self.notice_s - duration_s
        if within_s < duration_s:  # else it goes on by then, and may even stand still again
            self.world.loop.after(within_s, self._check_still, process)

    def _check_still(self, process: Process) -> None:
        """Who has ended meanwhile is judged by its end."""
        if process.alive:
            self.check_notice(process)

    def _misfit(self, host: str, field: str, duration_s: float) -> None:
        right = self.world.nodes[host].spec
        self.counts["node replaced by a misfit"] += 1
        self._replace(strange(right, field))
        self.strangers[host] = field
        self._later(duration_s)
        self.world.loop.after(duration_s, self._replace, right)

    def _replace(self, spec: NodeSpec) -> None:
        self.world.nodes[spec.name].end("replaced")
        self.strangers.pop(spec.name, None)
        self.world.start_node(spec)

    def _wedge(self, node: SimNode, restart_s: float) -> None:
        loop = self.world.loop
        self.counts["engine wedged"] += 1
        node.wedge()
        self._later(restart_s)
        loop.after(restart_s, self._unwedge, node)
        loop.after(AFTER_WEDGE_S, self._note_stuck, node)

    def _note_stuck(self, node: SimNode) -> None:
        """What waits at an engine that makes no step must be moved in time."""
        if node.alive and node.core.scheduler.work_waiting:
            workers = [worker for worker in self.world.workers.values() if worker.alive]
            stuck = [(worker, resting(worker, node)) for worker in workers]
            within_s = node.spec.timers.engine_stall_s + self.notice_s
            self.world.loop.after(within_s, self._check_stuck, node, stuck)
            if not self.frozen_s:  # who slept counts anew
                self.world.loop.after(node.spec.timers.engine_stall_exit_s + AFTER_WEDGE_S, self._check_exit, node)

    def _check_stuck(self, node: SimNode, stuck: list[tuple[SimWorker, dict[RequestId, int]]]) -> None:
        for worker, plans in stuck:
            noticed = node.alive and worker.awake_for(node.spec.timers.engine_stall_s + self.notice_awake_s)
            still = resting(worker, node).items() & plans.items() if noticed else ()
            for request_id, _ in still:
                raise Violation(f"{worker.host} leaves {request_id[:8]} at {node.host}, whose engine makes no step")

    def _check_exit(self, node: SimNode) -> None:
        if node.alive:
            raise Violation(f"{node.host} lives although its engine makes no step")

    def _unwedge(self, process: SimNode) -> None:
        process.end("wedged")
        self.restart(process)

    def _count_cut(self, deed: Cut) -> None:
        """After all that happens at the same moment: a partition is two cuts."""
        if deed.kv:
            self.counts["KV partition"] += 1
        elif not self.world.network.is_cut(deed.to_host, deed.from_host):
            self.counts["partition, one way"] += 1
        elif deed.from_host < deed.to_host:
            self.counts["partition, both ways"] += 1

    def _watch_drain(self, process: SimNode | SimWorker, restart_s: float, since: float) -> None:
        loop = self.world.loop
        timers = process.spec.timers
        bound = timers.node_drain_s + 2 * timers.dead_after_s if isinstance(process, SimNode) else timers.worker_drain_s
        self._later(restart_s + POLL_S)
        if not process.alive:
            loop.after(restart_s, self.restart, process)
        elif loop.now() - since > bound + 1.0 + self.frozen_s:
            raise Violation(f"{process.host} has not ended {loop.now() - since:.1f} s after SIGTERM")
        else:
            loop.after(POLL_S, self._watch_drain, process, restart_s, since)
