"""A node's decisions that do not depend on its role: Hello, heartbeats, Status, engine progress, drain. Pure.

Roles (prefill, decode) are plugged in and share the scheduler of their process. One call of `handle` takes in one
event, lets the roles act, and gives the engine its next step when there is one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import AttemptKey, Incarnation, TransferKey
from kvferry.common.cluster.actions import Action, ExitProcess, RunStep, Send
from kvferry.common.cluster.clients import Client, ClientTable
from kvferry.common.cluster.events import (
    DrainRequested,
    EngineFailed,
    Event,
    KvFailed,
    LayersDone,
    Received,
    StepDone,
    StepProgressed,
    Tick,
)
from kvferry.common.cluster.node_role import MakeRoles, NodeRole, RoleContext
from kvferry.common.cluster.sleep_detector import SleepDetector
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Cancel,
    Commit,
    Envelope,
    Gone,
    GoneReason,
    Heartbeat,
    Hello,
    HelloRefused,
    Reserve,
    RoleName,
    Status,
    Welcome,
    WrongIncarnation,
)
from kvferry.common.protocol.model_info import Compatibility, ModelInfo
from kvferry.common.scheduling.events import SchedulerEvent
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SequenceSpec

HandoverMessage = Reserve | Commit | Abort


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What this incarnation is and serves."""

    incarnation: Incarnation
    name: str
    model: ModelInfo
    compatibility: Compatibility
    kv_endpoints: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    staging: tuple[str, ...] = ()


@dataclass(slots=True)
class EngineProgress:
    """Whether the engine makes progress."""

    steps_done: int = 0
    progress_no: int = 0
    """Counts up while a long step makes progress."""
    started_at: float | None = None
    """When the oldest step in flight was given to the engine."""
    last_progress: float = math.inf
    """Set by the first event: the machine's clock does not start with the process."""

    def moved(self, now: float) -> None:
        """A layer of the step in progress is done: a long step is not a stuck one."""
        self.progress_no += 1
        self.last_progress = now

    def age_ms(self, now: float) -> int:
        """Age of the step in progress."""
        return 0 if self.started_at is None else int((now - self.started_at) * 1000)


@dataclass(slots=True)
class NodeCore:
    """All of one node except its roles."""

    identity: NodeIdentity
    timers: Timers
    scheduler: Scheduler
    roles: Sequence[NodeRole]
    clients: ClientTable
    progress: EngineProgress = field(default_factory=EngineProgress)
    draining_since: float | None = None
    _steps_in_flight: int = 0
    _ticks: SleepDetector = field(init=False)
    _last_status: float = -1e9
    _status_no: int = 0
    _preempted_all: bool = False
    _exiting: bool = False

    def __post_init__(self) -> None:
        self._ticks = SleepDetector(self.timers)

    @property
    def role_names(self) -> tuple[RoleName, ...]:
        """The roles of this process."""
        return tuple(role.name for role in self.roles)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event. Returns the actions to perform, in order."""
        actions: list[Action] = []
        match event:
            case Received(envelope, ""):
                actions += self._on_message(envelope, now)
            case StepDone(result):
                self._steps_in_flight -= 1
                self.progress.steps_done += 1
                self.progress.last_progress = now
                self.progress.started_at = now if self._steps_in_flight else None
                actions += self._scheduler_events(self.scheduler.apply(result, now), now)
            case EngineFailed(reason):
                actions.append(self._exit(f"the engine failed: {reason}", 1))
            case KvFailed(reason):
                actions.append(self._exit(f"the KV transfer failed: {reason}", 1))
            case DrainRequested():
                actions += self._drain(now)
            case Tick():
                actions += self._on_tick(now)
            case StepProgressed():
                self.progress.moved(now)
            case _:
                if isinstance(event, LayersDone):
                    self.progress.moved(now)
                for role in self.roles:
                    actions += role.on_event(event, now)
        if not isinstance(event, LayersDone | StepProgressed):
            actions += self._pump(now)
        for role in self.roles:
            actions += role.flush(now)
        return actions

    # -- clients

    def _on_message(self, envelope: Envelope, now: float) -> list[Action]:
        message, sender = envelope.message, envelope.sender
        if isinstance(message, Hello):
            return self._on_hello(sender, message, now)
        client = self.clients.get(sender)
        if client is None or envelope.receiver != self.identity.incarnation:
            return [Send(sender, WrongIncarnation())]
        client.last_heard = now
        if isinstance(message, Heartbeat):
            return self._on_heartbeat(client, message, now)
        if isinstance(message, HandoverMessage) and not _names(message.key, sender, self.identity.incarnation):
            return []  # no peer speaks for another incarnation, nor to one through this node
        actions: list[Action] = []
        if isinstance(message, Cancel):
            for role in self.roles:
                actions += role.on_message(client, message, now)
            return actions
        for role in self.roles:
            if role.handles(message):
                return role.on_message(client, message, now)
        return actions

    def _on_hello(self, sender: Incarnation, hello: Hello, now: float) -> list[Action]:
        reason = None
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = f"protocol_version: {PROTOCOL_VERSION} != {hello.protocol_version}"
        elif hello.compatibility is not None:
            reason = self.identity.compatibility.difference(hello.compatibility)
        if reason is not None:
            return [Send(sender, HelloRefused(reason=reason))]
        self.clients.hello(sender, hello.kind, hello.name, now)
        welcome = Welcome(
            name=self.identity.name,
            roles=self.role_names,
            model=self.identity.model,
            compatibility=self.identity.compatibility,
            kv_endpoints=self.identity.kv_endpoints,
            transports=self.identity.transports,
            staging=self.identity.staging,
        )
        return [Send(sender, welcome), self._status(self.clients.clients[sender], now)]

    def _on_heartbeat(self, client: Client, heartbeat: Heartbeat, now: float) -> list[Action]:
        if not client.update_wanted(heartbeat, now):
            return []
        actions: list[Action] = []
        for role in self.roles:
            actions += role.on_heartbeat(client, now)
        if client.kind == "worker":
            actions += self._answer_unknown(client)
        if heartbeat.last:
            actions += self._client_lost(client, now)
            self.clients.remove(client.incarnation)
        return actions

    def _answer_unknown(self, client: Client) -> list[Action]:
        """Report the requests that the worker expects here and that this node does not have. `never_known` makes the
        worker send the same Job again: only for an attempt that never was here, since one that got as far as a Commit
        must not run a second time."""
        actions: list[Action] = []
        for request in client.wanted.values():
            key = AttemptKey(request.request_id, request.attempt)
            if request.expected and not any(role.knows(*key) for role in self.roles):
                may_have_been = "prefill" not in self.role_names or key in client.lost
                reason: GoneReason = "lost" if may_have_been else "never_known"
                actions.append(
                    Send(client.incarnation, Gone(request_id=key.request_id, attempt=key.attempt, reason=reason))
                )
        return actions

    def _client_lost(self, client: Client, now: float) -> list[Action]:
        actions: list[Action] = []
        for role in self.roles:
            actions += role.on_client_lost(client, now)
        return actions

    # -- engine

    def _pump(self, now: float) -> list[Action]:
        """Give the engine steps while it takes some. Scheduling may start sequences: the roles act on that first."""
        actions: list[Action] = []
        while not self._exiting:
            scheduled = self.scheduler.schedule(now, self._may_start)
            actions += self._scheduler_events(scheduled.events, now)
            batch = scheduled.batch
            if batch is not None:
                self._steps_in_flight += 1
                if self.progress.started_at is None:
                    self.progress.started_at = now
                report = any(role.wants_layers(batch) for role in self.roles)
                actions.append(RunStep(replace(batch, report_layers=report)))
            elif not scheduled.events:
                break
        if not self.scheduler.work_waiting:
            self.progress.last_progress = now
        return actions

    def _may_start(self, spec: SequenceSpec) -> bool:
        return all(role.may_start(spec) for role in self.roles)

    def _scheduler_events(self, events: Sequence[SchedulerEvent], now: float) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            owner = next((role for role in self.roles if role.owns(event.seq_id)), None)
            if owner is not None:
                actions += owner.on_scheduler(event, now)
        return actions

    # -- time

    def _on_tick(self, now: float) -> list[Action]:
        slept_s = self._ticks.slept_s(now)
        if slept_s:
            self.clients.forgive(slept_s, now)
            self.progress.last_progress = min(now, self.progress.last_progress + slept_s)
        actions: list[Action] = []
        for client in self.clients.take_silent(now):
            actions += self._client_lost(client, now)
        for role in self.roles:
            actions += role.tick(now)
        if now - self._last_status >= self.timers.heartbeat_s:
            self._last_status = now
            actions += [self._status(client, now) for client in self.clients.clients.values()]
        if now - self.progress.last_progress > self.timers.engine_stall_exit_s:
            actions.append(self._exit("the engine makes no progress although work is waiting", 1))
        return actions + self._drain_tick(now)

    def _status(self, client: Client, now: float) -> Send:
        self._status_no += 1
        status = Status(
            status_no=self._status_no,
            draining=self.draining_since is not None,
            steps_done=self.progress.steps_done,
            step_age_ms=self.progress.age_ms(now),
            progress_no=self.progress.progress_no,
            work_waiting=self.scheduler.work_waiting,
            load=self.scheduler.load(),
            link_seq=client.link_seq,
        )
        return Send(client.incarnation, status)

    # -- the end

    def _drain(self, now: float) -> list[Action]:
        if self.draining_since is not None:
            return []
        self.draining_since = now
        actions: list[Action] = []
        for role in self.roles:
            actions += role.drain(now)
        return actions + [self._status(client, now) for client in self.clients.clients.values()]

    def _drain_tick(self, now: float) -> list[Action]:
        if self.draining_since is None or self._exiting:
            return []
        actions: list[Action] = []
        if not self._preempted_all and now - self.draining_since > self.timers.node_drain_s:
            self._preempted_all = True
            for role in self.roles:
                actions += role.preempt_all(now)
        overdue = now - self.draining_since > self.timers.node_drain_s + 2 * self.timers.dead_after_s
        if overdue or (all(role.is_quiescent() for role in self.roles) and self.scheduler.is_quiescent()):
            actions.append(self._exit("drained", 0))
        return actions

    def _exit(self, reason: str, code: int) -> ExitProcess:
        self._exiting = True
        return ExitProcess(reason, code)

    def check_invariants(self) -> None:
        """Raises InvariantError when any part disagrees."""
        self.clients.check_invariants()
        self.scheduler.check_invariants()
        for role in self.roles:
            role.check_invariants()
        for seq_id in self.scheduler.live_ids:
            owners = sum(role.owns(seq_id) for role in self.roles)
            if owners != 1:
                raise InvariantError(f"sequence {seq_id} is owned by {owners} roles")
        if self._steps_in_flight < 0:
            raise InvariantError("the engine returned more steps than it was given")

    def is_quiescent(self) -> bool:
        return self.scheduler.is_quiescent() and all(role.is_quiescent() for role in self.roles)


def _names(key: TransferKey, prefill: Incarnation, decode: Incarnation) -> bool:
    return key.prefill == prefill and key.decode == decode


def make_node_core(identity: NodeIdentity, context: RoleContext, make_roles: MakeRoles) -> NodeCore:
    """The core of a node: its roles share the context's scheduler and clients."""
    return NodeCore(identity, context.timers, context.scheduler, make_roles(context), context.clients)
