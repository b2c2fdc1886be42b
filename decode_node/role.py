"""The decode role: grants reservations, takes ownership, decodes, sends tokens. Pure.

The life of a request here:
 1. Reserve: refused when the node drains, has no link to the worker, or the request is not wanted; queued while there
    are no blocks; else granted, and pieces of this transfer key may be written into its blocks (`reservations.py`).
 2. Commit: owned. It runs when every piece has arrived undamaged; missing pieces may be asked for once (`commit.py`).
 3. Running: one token a step. Its stream starts with the token that came with the Commit (`token_outbox.py`).
 4. Ended: kept without blocks until the worker's wanted set drops the request (`entries.py`).
Reservations live while the wanted sets of prefill node and worker name them, committed requests while the worker's
does. In a process that has a prefill role too, requests computed there arrive through `adopt` and start at 3.
"""

from dataclasses import dataclass, field
from typing import assert_never

from kvferry.common.base.ids import AttemptKey, RequestId
from kvferry.common.cluster.actions import Action
from kvferry.common.cluster.clients import Client
from kvferry.common.cluster.events import Event, PieceArrived, PieceBad, SessionClosed
from kvferry.common.cluster.node_role import LocalHandover, RoleContext
from kvferry.common.protocol.messages import Abort, Cancel, Commit, Message, Refused, Reserve, RoleName
from kvferry.common.scheduling.events import (
    ChunkComputed,
    Failed,
    Finished,
    Preempted,
    Prefilled,
    Sampled,
    SchedulerEvent,
    Started,
)
from kvferry.common.scheduling.sequence import SequenceSpec
from kvferry.common.scheduling.step import StepBatch
from kvferry.decode_node.commit import CommitHandler
from kvferry.decode_node.entries import Entry, EntryTable, gone
from kvferry.decode_node.receive_table import ReceiveEvent, ReceiveState
from kvferry.decode_node.reservations import Reservations
from kvferry.decode_node.staging_slots import StagingSlots
from kvferry.decode_node.token_outbox import TokenOutbox


@dataclass(slots=True)
class DecodeRole:
    """All requests of the decode role of one process."""

    context: RoleContext
    name: RoleName = "decode"
    staging: StagingSlots = field(init=False)
    entries: EntryTable = field(init=False)
    _outbox: TokenOutbox = field(default_factory=TokenOutbox)
    _reservations: Reservations = field(init=False)
    _commits: CommitHandler = field(init=False)

    def __post_init__(self) -> None:
        context = self.context
        self.staging = StagingSlots(
            context.num_staging_slots, context.limits.staging_slots_per_transfer, context.timers
        )
        self.entries = EntryTable(context.scheduler, self.staging)
        self._reservations = Reservations(
            self.entries, context.timers, context.limits, context.shape.num_layers, context.clients
        )
        self._commits = CommitHandler(
            self.entries, context.scheduler, context.timers, context.clients, self.on_scheduler
        )

    # -- messages

    def handles(self, message: Message) -> bool:
        """Prefill nodes send Reserve, Commit and Abort."""
        return isinstance(message, Reserve | Commit | Abort)

    def on_message(self, client: Client, message: Message, now: float) -> list[Action]:
        match message:
            case Reserve():
                return self._reservations.on_reserve(client, message, now)
            case Commit():
                return self._commits.on_commit(client, message, now)
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

    # -- the wanted set

    def on_heartbeat(self, client: Client, now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in self.entries.of(client.incarnation):
            if entry.worker == client.incarnation:
                wanted = client.wants(entry.placement_no, *entry.attempt_key)
            else:
                wanted = client.wants(entry.transfer_no, *entry.attempt_key, entry.key.generation)
            if not wanted:
                actions += self.entries.drop(entry, now)
        if client.kind == "worker":
            for wanted_request in client.wanted.values():
                known = self.entries.by_attempt.get(AttemptKey(wanted_request.request_id, wanted_request.attempt))
                if wanted_request.expected and known is not None and known.worker == client.incarnation:
                    actions += self._report_state(known, wanted_request.next_index, wanted_request.resend)
        return actions

    def _report_state(self, entry: Entry, next_index: int, resend: bool) -> list[Action]:
        if entry.state in (ReceiveState.PREEMPTED, ReceiveState.LOST):
            return [gone(entry)]
        if entry.has_ended or (resend and entry.state is ReceiveState.RUNNING):
            self._outbox.add_from(entry, next_index)
        return []

    def on_client_lost(self, client: Client, now: float) -> list[Action]:
        """Free a worker's requests, or a prefill node's open reservations."""
        actions: list[Action] = []
        for entry in self.entries.of(client.incarnation):
            actions += self.entries.drop(entry, now)
        self._outbox.forget(client.incarnation)
        return actions

    def knows(self, request_id: RequestId, attempt: int) -> bool:
        entry = self.entries.by_attempt.get(AttemptKey(request_id, attempt))
        return entry is not None and entry.revocation is None

    # -- transport

    def on_event(self, event: Event, now: float) -> list[Action]:
        match event:
            case PieceArrived(piece):
                return self._commits.on_piece(piece, now)
            case PieceBad(key, number, reason):
                return self._commits.on_damaged(key, number, reason, now)
            case SessionClosed(peer):
                self.staging.on_session_closed(peer, now)
                return []
            case _:
                return []

    # -- the prefill role of the same process

    def adopt(self, computed: LocalHandover, now: float) -> list[Action]:
        """Own a request that decodes already, on the blocks that it was computed on."""
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
        return seq_id in self.entries.by_seq

    def on_scheduler(self, event: SchedulerEvent, now: float) -> list[Action]:
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
            case Started() | ChunkComputed() | Prefilled():
                pass  # of a prompt that this process computes: the prefill role has acted on it
            case _:
                assert_never(event)
        return []

    def _end(self, entry: Entry, event: ReceiveEvent, now: float) -> None:
        entry.machine.move(event, now)
        self._outbox.mark_end(entry)
        self.entries.detach(entry)

    def may_start(self, spec: SequenceSpec) -> bool:
        return True  # reservations wait in a queue of their own, not in the scheduler's

    def wants_layers(self, batch: StepBatch) -> bool:
        return False  # no KV leaves this role

    # -- time

    def tick(self, now: float) -> list[Action]:
        actions = self._reservations.revoke_unused(now)
        actions += self.staging.tick(lambda peer: self.context.clients.get(peer) is not None, now)
        for entry in self.entries:
            if entry.has_ended or entry.revocation is not None:
                continue
            actions += self._expire(entry, now) if now > entry.deadline else self._commits.tick(entry, now)
        return actions + self._reservations.give_way(now)

    def _expire(self, entry: Entry, now: float) -> list[Action]:
        if entry.is_open:
            return self.entries.revoke(entry, Refused(key=entry.key, reason="deadline"), now)
        return self.entries.lose(entry, "deadline", now)

    def flush(self, now: float) -> list[Action]:
        """Grant queued reservations while there are blocks, then send one Tokens message per worker."""
        return self._reservations.grant_queued(now) + self._outbox.flush(self.context.clients)

    # -- the end

    def drain(self, now: float) -> list[Action]:
        return self._reservations.drain(now)

    def preempt_all(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in self.entries:
            if entry.state in (ReceiveState.OWNED, ReceiveState.RUNNING):
                actions += self.entries.preempt(entry, now)
        return actions

    def is_quiescent(self) -> bool:
        return not self.entries.by_attempt and self._outbox.is_empty

    def check_invariants(self) -> None:
        """Raises InvariantError when the indexes disagree."""
        self.entries.check_invariants()


def make_decode_role(context: RoleContext) -> DecodeRole:
    """The role of a decode node."""
    return DecodeRole(context)
