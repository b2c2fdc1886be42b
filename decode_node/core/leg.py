"""The decode leg: grants room, takes ownership, decodes, reports tokens. Pure.

The life of a request here:
 1. Reserve: refused when draining, unknown to its worker, or unwanted; queued while there is no room; else granted,
    and pieces of this transfer key may be written into its blocks.
 2. Commit: owned. It runs when every piece is there and right; until then what is missing may be asked for once more.
 3. Running: one token a step; the stream starts with the token that came with the Commit.
 4. Its end is a record without blocks, until the worker's list no longer has the request.
Reservations live while the prefill node's and the worker's list keep them, committed requests while the worker's does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from common.config.protocol import Limits, Timers
from common.errors import InvariantError, RequestInvalidError
from common.ids import Incarnation, PlanKey, RequestId, TransferKey
from common.protocol.messages import (
    Abort,
    Cancel,
    Commit,
    CommitRefused,
    Committed,
    Gone,
    Granted,
    Message,
    Queued,
    Refused,
    Reserve,
    Revoke,
    Role,
    Tokens,
    TokensEntry,
)
from common.scheduling.events import Failed, Finished, GivenBack, Sampled, SchedulerEvent
from common.scheduling.scheduler import Scheduler
from common.scheduling.sequence import SequenceSpec
from common.scheduling.step import StepPlan
from common.state.actions import Action, ExpectPieces, ForgetPieces, Send
from common.state.clients import Client, ClientTable
from common.state.events import Event, PieceArrived, PieceBad
from common.state.handover_receive import PieceLedger, ReceiveEvent, ReceiveState
from decode_node.core.entry import Entry

TIMES_ASKED = 1
"""How often missing or damaged pieces are asked for again before the request counts as lost."""


@dataclass(slots=True)
class DecodeLeg:
    """All requests of the decode role of one process."""

    scheduler: Scheduler
    timers: Timers
    limits: Limits
    num_layers: int
    clients: Callable[[], ClientTable]
    role: Role = "decode"
    draining: bool = False
    entries: dict[PlanKey, Entry] = field(default_factory=dict)
    _by_key: dict[TransferKey, Entry] = field(default_factory=dict)
    _by_seq: dict[int, Entry] = field(default_factory=dict)
    _queued: dict[TransferKey, Entry] = field(default_factory=dict)
    _outbox: dict[Incarnation, list[TokensEntry]] = field(default_factory=dict)

    # -- messages

    def handles(self, message: Message) -> bool:
        """Reserve, Commit and Abort come from prefill nodes."""
        return isinstance(message, Reserve | Commit | Abort)

    def on_message(self, client: Client, message: Message, now: float) -> list[Action]:
        """See the module's docstring."""
        match message:
            case Reserve():
                return self._on_reserve(client, message, now)
            case Commit():
                return self._on_commit(client, message, now)
            case Abort():
                entry = self._by_key.get(message.key)
                return self._drop(entry) if entry is not None and entry.is_open else []
            case Cancel():
                return self._on_cancel(client, message)
            case _:
                return []

    def _on_reserve(self, client: Client, message: Reserve, now: float) -> list[Action]:
        key = message.key
        actions: list[Action] = []
        present = self.entries.get(PlanKey(key.request_id, key.attempt))
        if present is not None:
            if present.key == key:
                return self._answer_again(present)
            if not present.is_open or present.key.generation > key.generation:
                return [Send(client.incarnation, Refused(key=key, reason="gone"))]
            actions += self._drop(present)
        reason = self._refusal(client, message, now)
        if reason is not None:
            return [*actions, Send(client.incarnation, Refused(key=key, reason=reason))]
        entry = Entry.from_reserve(message, now, self.timers.deadline_grace_s)
        self.entries[entry.plan_key] = self._by_key[key] = entry
        try:
            return actions + self._grant_or_queue(entry, now)
        except RequestInvalidError as error:
            return [*actions, *self._drop(entry), Send(client.incarnation, Refused(key=key, reason=str(error)))]

    def _refusal(self, client: Client, message: Reserve, now: float) -> str | None:
        key = message.key
        if self.draining:
            return "draining"
        worker = self.clients().get(message.worker)
        if worker is None or now - worker.last_beat > self.timers.worker_link_s:
            return "no_worker_link"
        if not worker.wants(message.plan_no, key.request_id, key.attempt):
            return "gone"
        if not client.wants(message.transfer_no, key.request_id, key.attempt, key.generation):
            return "gone"
        if len(self._queued) >= self.limits.queued_reservations:
            return "full"
        return None

    def _grant_or_queue(self, entry: Entry, now: float) -> list[Action]:
        if not self._queued and self._reserve(entry, now):
            return self._granted(entry)
        self._queued[entry.key] = entry
        return [Send(entry.key.prefill, Queued(key=entry.key))]

    def _reserve(self, entry: Entry, now: float) -> bool:
        reservation = self.scheduler.reserve(entry.spec, now)
        if reservation is None:
            return False
        entry.seq_id = reservation.seq_id
        entry.ledger = PieceLedger(self.num_layers, reservation.first_token, last_arrival=now)
        entry.machine.move(ReceiveEvent.GRANT, now)
        self._by_seq[reservation.seq_id] = entry
        return True

    def _granted(self, entry: Entry) -> list[Action]:
        assert entry.seq_id is not None
        assert entry.ledger is not None
        table = self.scheduler.block_table(entry.seq_id)
        return [ExpectPieces(entry.key, table, entry.ledger.first_token_pos), self._grant_message(entry)]

    def _grant_message(self, entry: Entry) -> Send:
        assert entry.ledger is not None
        return Send(entry.key.prefill, Granted(key=entry.key, first_token=entry.ledger.first_token_pos))

    def _answer_again(self, entry: Entry) -> list[Action]:
        if entry.state is ReceiveState.QUEUED:
            return [Send(entry.key.prefill, Queued(key=entry.key))]
        if entry.state is ReceiveState.RESERVED:
            return [self._grant_message(entry)]
        return []  # committed since: the Reserve is an old copy

    def _on_commit(self, client: Client, message: Commit, now: float) -> list[Action]:
        entry = self._by_key.get(message.key)
        if entry is None or entry.ledger is None:
            return [Send(client.incarnation, CommitRefused(key=message.key, reason="not_reserved"))]
        if entry.commit is not None:
            return [self._committed(entry)]
        entry.commit = message
        entry.ledger.last_arrival = now
        entry.machine.move(ReceiveEvent.COMMIT, now)
        assert entry.seq_id is not None
        self.scheduler.commit(entry.seq_id)
        return self._complete_if_all(entry, now) or [self._committed(entry)]

    def _committed(self, entry: Entry, missing: tuple[int, ...] = ()) -> Send:
        complete = entry.state is not ReceiveState.OWNED
        return Send(entry.key.prefill, Committed(key=entry.key, complete=complete, missing=missing))

    def _complete_if_all(self, entry: Entry, now: float) -> list[Action]:
        """Start decoding when every piece is there and right."""
        assert entry.commit is not None
        assert entry.ledger is not None
        assert entry.seq_id is not None
        if entry.ledger.missing(entry.commit):
            return []
        fault = entry.ledger.fault(entry.commit)
        if fault is not None:
            return self._lose(entry, fault, now)
        entry.machine.move(ReceiveEvent.COMPLETE, now)
        actions: list[Action] = [ForgetPieces(entry.key), self._committed(entry)]
        commit = entry.commit
        for event in self.scheduler.activate(entry.seq_id, commit.token_id, commit.num_tokens, now):
            actions += self.on_scheduler(event, now)
        return actions

    def _on_cancel(self, client: Client, message: Cancel) -> list[Action]:
        actions: list[Action] = []
        for entry in [e for e in self.entries.values() if e.key.request_id == message.request_id]:
            if entry.worker == client.incarnation and entry.key.attempt <= message.attempt:
                actions += self._drop(entry)
        return actions

    # -- lists

    def on_list(self, client: Client, now: float) -> list[Action]:
        """Free what the client's list no longer has; answer what a worker expects."""
        actions: list[Action] = []
        for entry in list(self.entries.values()):
            if client.incarnation == entry.worker:
                if not client.wants(entry.plan_no, *entry.plan_key):
                    actions += self._drop(entry)
            elif client.incarnation == entry.key.prefill and entry.is_open:
                key = entry.key
                if not client.wants(entry.transfer_no, key.request_id, key.attempt, key.generation):
                    actions += self._drop(entry)
        if client.kind == "worker":
            for wanted in client.entries.values():
                known = self.entries.get(PlanKey(wanted.request_id, wanted.attempt))
                if wanted.expected and known is not None and known.worker == client.incarnation:
                    actions += self._tell_state(known, wanted.next_index, wanted.resend)
        return actions

    def _tell_state(self, entry: Entry, next_index: int, resend: bool) -> list[Action]:
        if entry.state in (ReceiveState.GIVEN_BACK, ReceiveState.LOST):
            return [self._gone(entry)]
        if entry.is_record or (resend and entry.state is ReceiveState.RUNNING):
            self._outbox.setdefault(entry.worker, []).append(self._tokens_from(entry, next_index))
        return []

    def _tokens_from(self, entry: Entry, first_index: int) -> TokensEntry:
        return TokensEntry(
            request_id=entry.key.request_id,
            attempt=entry.key.attempt,
            first_index=first_index,
            token_ids=tuple(entry.output_token_ids[first_index:]),
            finish=entry.finish,
            error=entry.error,
            cached_tokens=entry.commit.cached_tokens if entry.commit is not None else 0,
        )

    def _gone(self, entry: Entry) -> Send:
        reason = entry.error or ""
        given_back = entry.state is ReceiveState.GIVEN_BACK
        return Send(
            entry.worker,
            Gone(
                request_id=entry.key.request_id,
                attempt=entry.key.attempt,
                reason="given_back" if given_back else "lost",
                detail=reason,
            ),
        )

    def on_client_lost(self, client: Client, now: float) -> list[Action]:
        """A worker loses all it had; a prefill node's open reservations go."""
        actions: list[Action] = []
        for entry in list(self.entries.values()):
            mine = entry.worker == client.incarnation
            if mine or (entry.key.prefill == client.incarnation and entry.is_open):
                actions += self._drop(entry)
        self._outbox.pop(client.incarnation, None)
        return actions

    def knows(self, request_id: RequestId, attempt: int) -> bool:
        """Whether anything is held or recorded for this attempt."""
        return PlanKey(request_id, attempt) in self.entries

    # -- transport

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Pieces that were written, or came damaged."""
        match event:
            case PieceArrived(piece):
                entry = self._by_key.get(piece.key)
                if entry is None or entry.ledger is None or entry.state is ReceiveState.RUNNING or entry.is_record:
                    return []
                entry.ledger.add(piece, now)
                return self._complete_if_all(entry, now) if entry.commit is not None else []
            case PieceBad(key, _, reason):
                entry = self._by_key.get(key)
                if entry is not None and entry.state is ReceiveState.OWNED:
                    return self._ask_again(entry, reason, now)
                return []
            case _:
                return []

    def _ask_again(self, entry: Entry, why: str, now: float) -> list[Action]:
        assert entry.ledger is not None
        assert entry.commit is not None
        if entry.ledger.times_asked >= TIMES_ASKED:
            return self._lose(entry, why, now)
        entry.ledger.times_asked += 1
        entry.ledger.last_arrival = now
        return [self._committed(entry, entry.ledger.missing(entry.commit))]

    # -- scheduler

    def on_scheduler(self, event: SchedulerEvent, now: float) -> list[Action]:
        """Tokens and ends of running requests."""
        entry = self._by_seq.get(event.seq_id)
        if entry is None:
            return []
        match event:
            case Sampled(token_id=token_id, index=index):
                self._on_sampled(entry, token_id, index)
            case Finished(reason=reason):
                entry.finish = reason
                entry.machine.move(ReceiveEvent.FINISH, now)
                self._mark_end(entry)
                self._detach(entry)
            case Failed(why=why):
                entry.error = why
                entry.machine.move(ReceiveEvent.FAIL, now)
                self._mark_end(entry)
                self._detach(entry)
            case GivenBack():
                entry.machine.move(ReceiveEvent.GIVE_BACK, now)
                self._detach(entry)
                return [self._gone(entry)]
            case _:
                pass
        return []

    def _on_sampled(self, entry: Entry, token_id: int, index: int) -> None:
        if index == len(entry.output_token_ids):
            entry.output_token_ids.append(token_id)
        elif not (index < len(entry.output_token_ids) and entry.output_token_ids[index] == token_id):
            raise InvariantError(f"{entry.key}: token {index} does not continue what is known")
        first = TokensEntry(
            request_id=entry.key.request_id,
            attempt=entry.key.attempt,
            first_index=index,
            token_ids=(token_id,),
            cached_tokens=entry.commit.cached_tokens if entry.commit is not None else 0,
        )
        self._outbox.setdefault(entry.worker, []).append(first)

    def _mark_end(self, entry: Entry) -> None:
        """Put the end on the token that brought it, if that is still in the outbox; else say it alone."""
        waiting = self._outbox.setdefault(entry.worker, [])
        index = len(entry.output_token_ids) - 1
        for place, said in enumerate(waiting):
            if said.request_id == entry.key.request_id and said.first_index == index and entry.error is None:
                waiting[place] = self._tokens_from(entry, index)
                return
        waiting.append(self._tokens_from(entry, len(entry.output_token_ids)))

    def may_start(self, spec: SequenceSpec) -> bool:
        """Nothing waits in the queue for this leg."""
        return True

    def wants_layers(self, plan: StepPlan) -> bool:
        """Decoding is not ferried."""
        return False

    # -- time

    def tick(self, now: float) -> list[Action]:
        """Deadlines, missing pieces, room for queued reservations."""
        actions: list[Action] = []
        for entry in list(self.entries.values()):
            if entry.is_record:
                continue
            if now > entry.deadline:
                actions += self._expire(entry, now)
            elif entry.state is ReceiveState.OWNED and self._pieces_are_late(entry, now):
                actions += self._ask_again(entry, "pieces did not come", now)
        return actions

    def _pieces_are_late(self, entry: Entry, now: float) -> bool:
        return entry.ledger is not None and now - entry.ledger.last_arrival > self.timers.piece_idle_s

    def _expire(self, entry: Entry, now: float) -> list[Action]:
        if entry.is_open:
            return [*self._drop(entry), Send(entry.key.prefill, Refused(key=entry.key, reason="deadline"))]
        return self._lose(entry, "deadline", now)

    def flush(self, now: float) -> list[Action]:
        """Grant what waits while there is room, then one Tokens message a worker."""
        actions = self._grant_queued(now)
        for worker, said in self._outbox.items():
            client = self.clients().get(worker)
            if client is not None and said:
                client.link_seq += 1
                actions.append(Send(worker, Tokens(link_seq=client.link_seq, entries=tuple(said))))
        self._outbox.clear()
        return actions

    def _grant_queued(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for entry in sorted(self._queued.values(), key=lambda e: self._rank(e, now)):
            if not self._reserve(entry, now):
                break
            del self._queued[entry.key]
            actions += self._granted(entry)
        return actions

    def _rank(self, entry: Entry, now: float) -> tuple[int, float]:
        waited = now - entry.spec.accepted_at
        return (entry.spec.priority - int(waited // self.timers.aging_s), entry.spec.accepted_at)

    # -- the end

    def drain(self, now: float) -> list[Action]:
        """Uncommitted reservations go; what is owned is finished."""
        self.draining = True
        actions: list[Action] = []
        for entry in [e for e in self.entries.values() if e.is_open]:
            actions += [*self._drop(entry), Send(entry.key.prefill, Revoke(key=entry.key, reason="draining"))]
        return actions

    def give_back_all(self, now: float) -> list[Action]:
        """Give back what still runs: it is planned again elsewhere."""
        actions: list[Action] = []
        for entry in [e for e in self.entries.values() if e.state in (ReceiveState.OWNED, ReceiveState.RUNNING)]:
            actions += self._end_sequence(entry)
            entry.machine.move(ReceiveEvent.GIVE_BACK, now)
            actions.append(self._gone(entry))
        return actions

    def is_quiescent(self) -> bool:
        """Nothing is held and nothing is recorded."""
        return not self.entries and not self._outbox

    def _lose(self, entry: Entry, why: str, now: float) -> list[Action]:
        actions = self._end_sequence(entry)
        entry.error = why
        entry.machine.move(ReceiveEvent.LOSE, now)
        return [*actions, self._gone(entry)]

    def _end_sequence(self, entry: Entry) -> list[Action]:
        """Free the blocks of a live entry. Writing is stopped first, in order."""
        actions: list[Action] = []
        if entry.state in (ReceiveState.RESERVED, ReceiveState.OWNED):
            actions.append(ForgetPieces(entry.key))
        if entry.seq_id is not None:
            self.scheduler.abort(entry.seq_id)
            self._detach(entry)
        return actions

    def _detach(self, entry: Entry) -> None:
        """The scheduler no longer has its sequence."""
        if entry.seq_id is not None:
            del self._by_seq[entry.seq_id]
            entry.seq_id = None

    def _drop(self, entry: Entry) -> list[Action]:
        """Leave no trace of it."""
        actions = self._end_sequence(entry)
        self._queued.pop(entry.key, None)
        self.entries.pop(entry.plan_key, None)
        self._by_key.pop(entry.key, None)
        return actions

    def check_invariants(self) -> None:
        """Raises InvariantError when the indexes disagree."""
        if {id(e) for e in self.entries.values()} != {id(e) for e in self._by_key.values()}:
            raise InvariantError("decode entries are not indexed by transfer key")
        for plan_key, entry in self.entries.items():
            entry.check_invariants()
            if entry.plan_key != plan_key:
                raise InvariantError(f"{entry.key} is filed under {plan_key}")
            if (entry.key in self._queued) != (entry.state is ReceiveState.QUEUED):
                raise InvariantError(f"{entry.key} is {entry.state.name} but the queue disagrees")
            if entry.seq_id is not None and self._by_seq.get(entry.seq_id) is not entry:
                raise InvariantError(f"{entry.key} is not indexed by its sequence")
        if len(self._by_seq) != sum(1 for e in self.entries.values() if e.seq_id is not None):
            raise InvariantError("sequences of no entry are indexed")
