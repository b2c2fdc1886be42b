"""Injects the faults of a schedule into a world, and tracks when the last fault is over.

Checks only the bounds of single faults: draining, a stuck engine, a request that crashes nodes.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from kvferry.common.base.ids import RequestId
from kvferry.ops.simulate.kv_network import SEND_TIMEOUT_S
from kvferry.ops.simulate.network import Delays
from kvferry.ops.simulate.node import NodeSpec, SimNode
from kvferry.ops.simulate.process import Process
from kvferry.ops.simulate.worker import SimWorker
from kvferry.ops.simulate.world import World
from tests.simulation.checks import Violation, requests_waiting_at
from tests.simulation.incompatible import make_incompatible
from tests.simulation.schedule import (
    Ask,
    Blip,
    Crash,
    Cut,
    Drain,
    Fault,
    Freeze,
    Incompatible,
    Schedule,
    Slow,
    Stall,
    Wedge,
)

NOTICE_S = 3.0
"""Bound from the end of a node until no request waits there any more."""
CRASH_AT_MOST_S = 0.5
"""A process that has not reached the action of its crash ends after this time."""
AFTER_WEDGE_S = 1.0
"""After this time an engine with work has some of it in its endless step."""
AFTER_KILL_S = 4.0
"""After this time a request that crashed its node has crashed the next one, if any."""
POLL_S = 0.25


@dataclass(slots=True)
class Faults:
    """The faults of one schedule."""

    schedule: Schedule
    world: World
    check_notice: Callable[[Process], None]
    """Called when no process may depend on this one any more."""
    calm_at: float = 0.0
    """When the last fault is over, as far as known."""
    incompatible: dict[str, str] = field(default_factory=dict)
    """Name of each node that is incompatible now -> the field that differs."""
    _kills: Counter[int] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    """Faults that took effect."""

    @property
    def frozen_s(self) -> float:
        """Total time that processes are frozen or stalled."""
        return sum(event.duration_s for event in self.schedule.events if isinstance(event, Freeze | Stall))

    @property
    def notice_s(self) -> float:
        """Bound from the end of a node until every process that is awake has noticed it."""
        return self.notice_awake_s + self.frozen_s

    @property
    def notice_awake_s(self) -> float:
        """The same bound for a process that stays awake, with the slowest message."""
        slow = [event.extra_s for event in self.schedule.events if isinstance(event, Slow)]
        delays = self.schedule.delays
        slowest_s = 0.9 + delays.base_s + delays.jitter_s + delays.slow_s + 2 * max(slow, default=0.0)
        return NOTICE_S + slowest_s

    def inject(self, fault: Fault) -> None:
        """Inject a fault now."""
        self._later(0.0)
        match fault:
            case Crash(_, host, after_actions, restart_s):
                self._crash(host, after_actions, restart_s)
            case Drain(_, host, restart_s):
                process = self._process(host)
                if isinstance(process, SimNode | SimWorker):
                    self.counts["drain of a worker" if isinstance(process, SimWorker) else "drain of a node"] += 1
                    process.drain()
                    self._check_drain(process, restart_s, self.world.loop.now())
            case Freeze(_, host, duration_s):
                self._freeze(host, duration_s)
            case Stall(_, host, duration_s):
                self._stall(host, duration_s)
            case Wedge(_, host, restart_s):
                process = self._process(host)
                if isinstance(process, SimNode):
                    self._wedge(process, restart_s)
            case Incompatible(_, host, field, duration_s):
                self._replace_by_incompatible(host, field, duration_s)
            case Blip(_, host_a, host_b, kv):
                self.counts["KV connection broken" if kv else "connection broken"] += 1
                (self.world.kv if kv else self.world.network).blip(host_a, host_b)
            case Cut(_, from_host, to_host, duration_s, kv):
                (self.world.kv if kv else self.world.network).cut(from_host, to_host, duration_s)
                self._later(duration_s)
                self.world.loop.after(0.0, self._count_cut, fault)
            case Slow(_, host, extra_s, duration_s):
                self.counts["slow host"] += 1
                self.world.network.slow_hosts[host] = extra_s
                self._later(duration_s)
                self.world.loop.after(duration_s, self.world.network.speed_up, host)
            case _:
                assert_never(fault)

    def end_late_writes(self) -> None:
        """Stop delaying one-sided writes and losing their confirmations; earlier writes may still be in flight."""
        kv = self.world.kv
        if kv.late_share + kv.unconfirmed_share > 0:
            kv.late_share = kv.unconfirmed_share = 0.0
            self._later(SEND_TIMEOUT_S)

    def restart(self, process: Process) -> None:
        """Start a new incarnation at the same address, unless there is one or the old one is alive."""
        latest = self.world.workers.get(process.host) or self.world.nodes.get(process.host)
        if latest is process and not process.alive:
            self.counts["restart at the same address"] += 1
            self.world.restart(process)

    def killed(self, node: SimNode, seed: int) -> None:
        """Check that a request has not crashed more than crash_limit decode nodes, and restart the node.

        With delays or other faults a router cannot distinguish each crash from another loss: max_attempts is the bound.
        """
        self._kills[seed] += 1
        limits = node.spec.limits
        undisturbed = self.schedule.delays == Delays() and not any(
            not isinstance(event, Ask) for event in self.schedule.events
        )
        if self._kills[seed] > (limits.crash_limit if undisturbed else limits.max_attempts):
            raise Violation(f"one request crashed {self._kills[seed]} processes")
        self._later(AFTER_KILL_S)
        self.world.loop.after(0.5, self.restart, node)

    def total(self) -> Counter[str]:
        """Count all faults, including those of the networks."""
        network, kv = self.world.network, self.world.kv
        of_networks = {
            "message lost with its connection": network.num_lost,
            "message late after its connection": network.num_late,
            "message held by a cut": network.num_held,
            "piece lost": kv.num_lost,
            "piece damaged": kv.num_damaged,
            "one-sided write": kv.num_writes,
            "one-sided write after its hand-over": kv.num_late,
            "one-sided write without confirmation": kv.num_unconfirmed,
        }
        return self.counts + Counter(of_networks)

    # -- the kinds of faults

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
            self._expect_notice(process, duration_s)
            self._later(duration_s)
            loop.after(duration_s, process.thaw)

    def _stall(self, host: str, duration_s: float) -> None:
        process = self._process(host)
        if process is not None and not process.stalled:
            self.counts["worker stalled" if isinstance(process, SimWorker) else "node stalled"] += 1
            process.stall()
            self._expect_notice(process, duration_s)
            self._later(duration_s)
            self.world.loop.after(duration_s, process.end_stall)

    def _expect_notice(self, process: Process, duration_s: float) -> None:
        """Check that no process depends on one that is still for longer than the notice bound."""
        within_s = self.notice_s - duration_s
        if within_s < duration_s:  # otherwise it has continued by then, and may even be still again
            self.world.loop.after(within_s, self._check_still, process)

    def _check_still(self, process: Process) -> None:
        """A process that has ended meanwhile is checked by its end."""
        if process.alive:
            self.check_notice(process)

    def _replace_by_incompatible(self, host: str, field: str, duration_s: float) -> None:
        original = self.world.nodes[host].spec
        self.counts["node replaced by an incompatible one"] += 1
        self._replace(make_incompatible(original, field))
        self.incompatible[host] = field
        self._later(duration_s)
        self.world.loop.after(duration_s, self._replace, original)

    def _replace(self, spec: NodeSpec) -> None:
        self.world.nodes[spec.name].end("replaced")
        self.incompatible.pop(spec.name, None)
        self.world.start_node(spec)

    def _wedge(self, node: SimNode, restart_s: float) -> None:
        loop = self.world.loop
        self.counts["engine wedged"] += 1
        node.wedge()
        self._later(restart_s)
        loop.after(restart_s, self._unwedge, node)
        loop.after(AFTER_WEDGE_S, self._note_stuck, node)

    def _note_stuck(self, node: SimNode) -> None:
        """Check that requests at a stuck engine move in time, and that its node exits."""
        if node.alive and node.core.scheduler.work_waiting:
            workers = [worker for worker in self.world.workers.values() if worker.alive]
            stuck = [(worker, requests_waiting_at(worker, node)) for worker in workers]
            within_s = node.spec.timers.engine_stall_s + self.notice_s
            self.world.loop.after(within_s, self._check_stuck, node, stuck)
            if not self.frozen_s:  # a process that was frozen restarts its timeouts
                self.world.loop.after(node.spec.timers.engine_stall_exit_s + AFTER_WEDGE_S, self._check_exit, node)

    def _check_stuck(self, node: SimNode, stuck: list[tuple[SimWorker, dict[RequestId, int]]]) -> None:
        for worker, placements in stuck:
            noticed = node.alive and worker.awake_for(node.spec.timers.engine_stall_s + self.notice_awake_s)
            still = requests_waiting_at(worker, node).items() & placements.items() if noticed else ()
            for request_id, _ in still:
                raise Violation(f"{worker.host} leaves {request_id[:8]} at {node.host}, whose engine makes no step")

    def _check_exit(self, node: SimNode) -> None:
        if node.alive:
            raise Violation(f"{node.host} is alive although its engine makes no step")

    def _unwedge(self, process: SimNode) -> None:
        process.end("wedged")
        self.restart(process)

    def _count_cut(self, cut: Cut) -> None:
        """Count a cut, after all events of the same time: a partition is two cuts."""
        if cut.kv:
            self.counts["KV partition"] += 1
        elif not self.world.network.is_cut(cut.to_host, cut.from_host):
            self.counts["partition, one way"] += 1
        elif cut.from_host < cut.to_host:
            self.counts["partition, both ways"] += 1

    def _check_drain(self, process: SimNode | SimWorker, restart_s: float, since: float) -> None:
        loop = self.world.loop
        timers = process.spec.timers
        bound = timers.node_drain_s + 2 * timers.dead_after_s if isinstance(process, SimNode) else timers.worker_drain_s
        self._later(restart_s + POLL_S)
        if not process.alive:
            loop.after(restart_s, self.restart, process)
        elif loop.now() - since > bound + 1.0 + self.frozen_s:
            raise Violation(f"{process.host} has not ended {loop.now() - since:.1f} s after SIGTERM")
        else:
            loop.after(POLL_S, self._check_drain, process, restart_s, since)
