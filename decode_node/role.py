"""The decode role: grants room, takes ownership, decodes, reports tokens. Pure.

The life of a request here:
 1. Reserve: refused when draining, unknown to its worker, or unwanted; queued while there is no room; else granted,
    and pieces of this transfer key may be written into its blocks (`reservations.py`).
 2. Commit: owned. It runs when every piece is there and right; what is missing may be asked for once more
    (`takeover.py`).
 3. Running: one token a step; the stream starts with the token that came with the Commit (`outbox.py`).
 4. Its end is a record without blocks, until the worker's list no longer has the request (`entries.py`).
Reservations live while the prefill node's and the worker's list keep them, committed requests while the worker's does.
Where the process has a prefill role too, what that one computes comes by `take` and starts at 3.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.common.base.ids import (
    AttemptKey,
    RequestId,
)
from kvferry.common.cluster.actions import Action
from kvferry.common.cluster.clients import (
    Client,
    ClientTable,
)
from kvferry.common.cluster.events import (
    Event,
    PieceArrived,
    PieceBad,
    SessionClosed,
)
from kvferry.common.cluster.node_role import LocalHandover
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Abort, Cancel, Commit, Message, Refused, Reserve, RoleName
from kvferry.common.scheduling.events import Failed, Finished, Preempted, Sampled, SchedulerEvent
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SequenceSpec
from kvferry.common.scheduling.step import StepBatch
from kvferry.decode_node.commit import (
    CommitHandler,
    CommitResult,
)
from kvferry.decode_node.entries import (
    Entry,
    EntryTable,
    gone,
)
from kvferry.decode_node.receive_table import (
    ReceiveEvent,
    ReceiveState,
)
from kvferry.decode_node.reservations import Reservations
from kvferry.decode_node.staging_slots import StagingSlots
from kvferry.decode_node.token_outbox import TokenOutbox


@dataclass(slots=True)
class DecodeRole:
    """All requests of the decode role of one process."""

    scheduler: Scheduler
    timers: Timers
    limits: Limits
    num_layers: int
    clients: Callable[[], ClientTable]
    num_staging_slots: int = 0
    """Slots that one-sided transports may write into."""
    name: RoleName = "decode"
    staging: StagingSlots = field(init=False)
    entries: EntryTable = field(init=False)
    _outbox: TokenOutbox = field(default_factory=TokenOutbox)
    _reservations: Reservations = field(init=False)
    _commits: CommitHandler = field(init=False)

    def __post_init__(self) -> None:
        self.staging = StagingSlots(self.num_staging_slots, self.limits.staging_slots_per_transfer, self.timers)
        self.entries = EntryTable(self.scheduler, self.staging)
        self._reservations = Reservations(self.entries, self.timers, self.limits, self.num_layers, self.clients)
        self._commits = CommitHandler(self.entries, self.scheduler, self.timers, self.clients)

    # -- messages

    def handles(self, message: Message) -> bool:
        """Reserve, Commit and Abort come from prefill nodes."""
        return isinstance(message, Reserve | Commit | Abort)

    def on_message(self, client: Client, message: Message, now: float) -> list[Action]:
        """See the module's docstring."""
        match message:
            case Reserve():
                return self._reservations.on_reserve(client, message, now)
            case Commit():
                return self._follow(self._commits.on_commit(client, message, now), now)
            case Abort():
                return self._on_abort(message, now)
            case Cancel():
                return self._on_cancel(client, message, now)
            case _:
                return []

    def _on_abort(self, message: Abort, now: float) -> list[Action]:
        entry = self.entries.by_key.get(message.key)
        actions = self.entries.drop(entry, now) if entry is not None and entry.is_open else []
        if message.stopped:
            self.staging.on_stopped(message.key)
        return actions

    def _on_cancel(self, client: Client, message: Cancel, now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in self.entries:
            mine = entry.worker == client.incarnation and entry.key.request_id == message.request_id
            if mine and entry.key.attempt <= message.attempt:
                actions += self.entries.drop(entry, now)
        return actions

    # -- lists

    def on_heartbeat(self, client: Client, now: float) -> list[Action]:
        """Free what the client's list no longer has; answer what a worker expects."""
        actions: list[Action] = []
        for entry in self.entries.of(client.incarnation):
            if entry.worker == client.incarnation:
                wanted = client.wants(entry.placement_no, *entry.attempt_key)
            else:
                wanted = client.wants(entry.transfer_no, *entry.attempt_key, entry.key.generation)
            if not wanted:
                actions += self.entries.drop(entry, now)
        if client.kind == "worker":
            for line in client.entries.values():
                known = self.entries.by_attempt.get(AttemptKey(line.request_id, line.attempt))
                if line.expected and known is not None and known.worker == client.incarnation:
                    actions += self._tell_state(known, line.next_index, line.resend)
        return actions

    def _tell_state(self, entry: Entry, next_index: int, resend: bool) -> list[Action]:
        if entry.state in (ReceiveState.PREEMPTED, ReceiveState.LOST):
            return [gone(entry)]
        if entry.is_record or (resend and entry.state is ReceiveState.RUNNING):
            self._outbox.add_from(entry, next_index)
        return []

    def on_client_lost(self, client: Client, now: float) -> list[Action]:
        """A worker loses all it had; a prefill node's open reservations go."""
        actions: list[Action] = []
        for entry in self.entries.of(client.incarnation):
            actions += self.entries.drop(entry, now)
        self._outbox.forget(client.incarnation)
        return actions

    def knows(self, request_id: RequestId, attempt: int) -> bool:
        """Whether anything is held or recorded for this attempt."""
        entry = self.entries.by_attempt.get(AttemptKey(request_id, attempt))
        return entry is not None and entry.revocation is None

    # -- transport

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Pieces that were written, or came damaged."""
        match event:
            case PieceArrived(piece):
                return self._follow(self._commits.on_piece(piece, now), now)
            case PieceBad(key, number, reason):
                return self._commits.on_damaged(key, number, reason, now)
            case SessionClosed(peer):
                self.staging.on_session_closed(peer, now)
                return []
            case _:
                return []

    # -- the prefill role of the same process

    def take(self, computed: LocalHandover, now: float) -> list[Action]:
        """It decodes already, and its blocks stay where they are. See LocalDecode."""
        entry = Entry.from_local(computed)
        stray = self.entries.by_attempt.get(entry.attempt_key)
        actions = [] if stray is None else self.entries.drop(stray, now)
        self.entries.add(entry)
        self.entries.attach(entry, computed.seq_id)
        entry.machine.move(ReceiveEvent.ADOPT, now)
        self._outbox.add_token(entry, computed.token_id, computed.index)
        return actions

    # -- scheduler

    def owns(self, seq_id: int) -> bool:
        """See Leg."""
        return seq_id in self.entries.by_seq

    def _follow(self, started: CommitResult, now: float) -> list[Action]:
        actions = started.actions
        for event in started.events:
            actions += self.on_scheduler(event, now)
        return actions

    def on_scheduler(self, event: SchedulerEvent, now: float) -> list[Action]:
        """Tokens and ends of running requests."""
        entry = self.entries.by_seq[event.seq_id]
        match event:
            case Sampled(token_id=token_id, index=index):
                self._outbox.add_token(entry, token_id, index)
            case Finished(reason=reason):
                entry.finish = reason
                self._end(entry, ReceiveEvent.FINISH, now)
            case Failed(why=why):
                entry.error = why
                self._end(entry, ReceiveEvent.FAIL, now)
            case Preempted():
                entry.machine.move(ReceiveEvent.PREEMPT, now)
                self.entries.detach(entry)
                return [gone(entry)]
            case _:
                pass
        return []

    def _end(self, entry: Entry, event: ReceiveEvent, now: float) -> None:
        entry.machine.move(event, now)
        self._outbox.mark_end(entry)
        self.entries.detach(entry)

    def may_start(self, spec: SequenceSpec) -> bool:
        """Nothing waits in the queue for this role."""
        return True

    def wants_layers(self, plan: StepBatch) -> bool:
        """Decoding is not ferried."""
        return False

    # -- time

    def tick(self, now: float) -> list[Action]:
        """Deadlines, missing pieces, grants that are not used or stand in the way, staging slots that rest."""
        actions = self._reservations.revoke_unused(now)
        actions += self.staging.tick(lambda peer: self.clients().get(peer) is not None, now)
        for entry in self.entries:
            if entry.is_record or entry.revocation is not None:
                continue
            actions += self._expire(entry, now) if now > entry.deadline else self._commits.tick(entry, now)
        return actions + self._reservations.give_way(now)

    def _expire(self, entry: Entry, now: float) -> list[Action]:
        if entry.is_open:
            return self.entries.revoke(entry, Refused(key=entry.key, reason="deadline"), now)
        return self.entries.lose(entry, "deadline", now)

    def flush(self, now: float) -> list[Action]:
        """Grant what waits while there is room, then one Tokens message a worker."""
        return self._reservations.grant_queued(now) + self._outbox.flush(self.clients())

    # -- the end

    def drain(self, now: float) -> list[Action]:
        """Uncommitted reservations go; what is owned is finished."""
        return self._reservations.drain(now)

    def preempt_all(self, now: float) -> list[Action]:
        """Give back what still runs: it is planned again elsewhere."""
        actions: list[Action] = []
        for entry in self.entries:
            if entry.state in (ReceiveState.OWNED, ReceiveState.RUNNING):
                actions += self.entries.preempt(entry, now)
        return actions

    def is_quiescent(self) -> bool:
        """Nothing is held and nothing is recorded."""
        return not self.entries.by_attempt and self._outbox.is_empty

    def check_invariants(self) -> None:
        """Raises InvariantError when the indexes disagree."""
        self.entries.check_invariants()
