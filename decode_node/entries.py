"""One request on the decode node, from its reservation to its end, and the table of all of them. Pure.

Found by attempt, by transfer key and by sequence. An entry's blocks are the scheduler's sequence; pieces for its key
stop being written before its blocks are freed, in this order of actions.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import AttemptKey, Incarnation, TransferKey
from kvferry.common.cluster.actions import Action, ForgetPieces, Send
from kvferry.common.cluster.node_role import LocalHandover
from kvferry.common.cluster.table import Machine
from kvferry.common.protocol.messages import Commit, FinishReason, Gone, Refused, Reserve, Revoke
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SequenceSpec
from kvferry.decode_node.receive_table import (
    ENDED,
    HOLDS_BLOCKS,
    RECEIVE_TABLE,
    PieceLedger,
    ReceiveEvent,
    ReceiveState,
)
from kvferry.decode_node.staging_slots import StagingSlots


@dataclass(slots=True)
class Entry:
    """What the decode role keeps of one attempt of one request."""

    key: TransferKey
    worker: Incarnation
    placement_no: int
    transfer_no: int
    sequence: SequenceSpec
    """What the scheduler is given."""
    deadline: float
    """Local time in seconds, including the grace."""
    output_token_ids: "array[int]"
    """All output ids of the request, including earlier attempts'."""
    machine: Machine[ReceiveState, ReceiveEvent] = field(init=False)
    seq_id: int | None = None
    ledger: PieceLedger | None = None
    staged: bool = False
    """Its sender can write into staging slots."""
    revocation: Revoke | Refused | None = None
    """What its prefill node was sent when the reservation was not kept; repeated when that asks again."""
    commit: Commit | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV the prefix cache had where the prompt was computed."""
    finish: FinishReason | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.machine = Machine(RECEIVE_TABLE, f"{self.key.request_id[:8]}/{self.key.attempt}.{self.key.generation}")

    @classmethod
    def from_reserve(cls, message: Reserve, now: float, grace_s: float) -> "Entry":
        """A requested reservation. Times become local ones here."""
        accepted_at = now - message.waited_ms / 1000
        return cls(
            key=message.key,
            worker=message.worker,
            placement_no=message.placement_no,
            transfer_no=message.transfer_no,
            sequence=SequenceSpec.of(message.spec, accepted_at=accepted_at, mode="decode"),
            deadline=now + message.remaining_ms / 1000 + grace_s,
            output_token_ids=message.spec.output_token_ids[:],
            staged=message.staged,
        )

    @classmethod
    def from_local(cls, computed: LocalHandover) -> "Entry":
        """A request that this process has computed itself: an entry without a transfer."""
        return cls(
            key=computed.key,
            worker=computed.worker,
            placement_no=computed.placement_no,
            transfer_no=0,
            sequence=computed.sequence,
            deadline=computed.deadline,
            output_token_ids=computed.output_token_ids[:],
            cached_tokens=computed.cached_tokens,
        )

    @property
    def attempt_key(self) -> AttemptKey:
        """What the worker knows it by."""
        return AttemptKey(self.key.request_id, self.key.attempt)

    @property
    def state(self) -> ReceiveState:
        return self.machine.state

    @property
    def is_local(self) -> bool:
        """Computed in this process: nothing is transferred for it."""
        return self.key.prefill == self.key.decode

    @property
    def has_ended(self) -> bool:
        """Kept only to be reported again."""
        return self.state in ENDED

    @property
    def is_open(self) -> bool:
        """Not committed: kept for its prefill node, until that one's wanted set drops it."""
        return self.state in (ReceiveState.QUEUED, ReceiveState.RESERVED, ReceiveState.REVOKED)

    def check_invariants(self) -> None:
        """Raises InvariantError when state and holdings disagree."""
        holds = self.seq_id is not None
        if holds != (self.state in HOLDS_BLOCKS):
            raise InvariantError(f"{self.key} is {self.state.name} with sequence {self.seq_id}")
        if (self.revocation is not None) != (self.state is ReceiveState.REVOKED):
            raise InvariantError(f"{self.key} is {self.state.name} with revocation {self.revocation}")
        owned = self.state in (ReceiveState.OWNED, ReceiveState.RUNNING)
        if owned and (self.commit is None) != self.is_local:
            raise InvariantError(f"{self.key} is {self.state.name} and its Commit is {self.commit}")


@dataclass(slots=True)
class EntryTable:
    """All entries, and how they end."""

    scheduler: Scheduler
    staging: StagingSlots
    by_attempt: dict[AttemptKey, Entry] = field(default_factory=dict)
    by_key: dict[TransferKey, Entry] = field(default_factory=dict)
    by_seq: dict[int, Entry] = field(default_factory=dict)
    queued: dict[TransferKey, Entry] = field(default_factory=dict)
    """Reservations that wait for blocks."""

    def __iter__(self) -> Iterator[Entry]:
        """Over a copy: entries may be dropped meanwhile."""
        return iter(list(self.by_attempt.values()))

    def add(self, entry: Entry) -> None:
        self.by_attempt[entry.attempt_key] = self.by_key[entry.key] = entry

    def attach(self, entry: Entry, seq_id: int) -> None:
        entry.seq_id = seq_id
        self.by_seq[seq_id] = entry

    def detach(self, entry: Entry) -> None:
        """The scheduler no longer has its sequence."""
        if entry.seq_id is not None:
            del self.by_seq[entry.seq_id]
            entry.seq_id = None

    def drop(self, entry: Entry, now: float) -> list[Action]:
        """Remove it and free its blocks."""
        actions = self._end_sequence(entry, now)
        self.queued.pop(entry.key, None)
        self.by_attempt.pop(entry.attempt_key, None)
        self.by_key.pop(entry.key, None)
        return actions

    def revoke(self, entry: Entry, answer: Revoke | Refused, now: float) -> list[Action]:
        """Cancel the reservation and notify the prefill node. The entry stays, without blocks, until that node's wanted
        set drops the request: its Reserve may arrive once more."""
        actions = self._end_sequence(entry, now)
        self.queued.pop(entry.key, None)
        entry.ledger, entry.revocation = None, answer
        entry.machine.move(ReceiveEvent.REVOKE, now)
        return [*actions, Send(entry.key.prefill, answer)]

    def lose(self, entry: Entry, why: str, now: float) -> list[Action]:
        """It cannot continue here: notify its worker, and keep the entry to answer again."""
        actions = self._end_sequence(entry, now)
        entry.error = why
        entry.machine.move(ReceiveEvent.LOSE, now)
        return [*actions, gone(entry)]

    def preempt(self, entry: Entry, now: float) -> list[Action]:
        """It continues elsewhere: notify its worker, and keep the entry to answer again."""
        actions = self._end_sequence(entry, now)
        entry.machine.move(ReceiveEvent.PREEMPT, now)
        return [*actions, gone(entry)]

    def stop_writing(self, entry: Entry, now: float) -> list[Action]:
        """Have no piece written for it any more. Its staging slots are free if the Commit has confirmed every write;
        otherwise they are quarantined."""
        self.staging.release(entry.key, now, confirmed=entry.commit is not None)
        return [ForgetPieces(entry.key)]

    def _end_sequence(self, entry: Entry, now: float) -> list[Action]:
        actions: list[Action] = []
        if entry.state in (ReceiveState.RESERVED, ReceiveState.OWNED):
            actions += self.stop_writing(entry, now)
        if entry.seq_id is not None:
            self.scheduler.abort(entry.seq_id)
            self.detach(entry)
        return actions

    def of(self, client: Incarnation) -> list[Entry]:
        """The entries of a worker, or the open ones of a prefill node."""
        return [e for e in self if e.worker == client or (e.key.prefill == client and e.is_open)]

    def check_invariants(self) -> None:
        """Raises InvariantError when the indexes disagree."""
        self.staging.check_invariants()
        if {id(e) for e in self.by_attempt.values()} != {id(e) for e in self.by_key.values()}:
            raise InvariantError("decode entries are not indexed by transfer key")
        for attempt_key, entry in self.by_attempt.items():
            entry.check_invariants()
            if entry.attempt_key != attempt_key:
                raise InvariantError(f"{entry.key} is filed under {attempt_key}")
            if (entry.key in self.queued) != (entry.state is ReceiveState.QUEUED):
                raise InvariantError(f"{entry.key} is {entry.state.name} but the queue disagrees")
            if entry.seq_id is not None and self.by_seq.get(entry.seq_id) is not entry:
                raise InvariantError(f"{entry.key} is not indexed by its sequence")
        if len(self.by_seq) != sum(1 for e in self.by_attempt.values() if e.seq_id is not None):
            raise InvariantError("sequences of no entry are indexed")


def gone(entry: Entry) -> Send:
    """The message to its worker about an entry that was lost or preempted."""
    preempted = entry.state is ReceiveState.PREEMPTED
    message = Gone(
        request_id=entry.key.request_id,
        attempt=entry.key.attempt,
        reason="preempted" if preempted else "lost",
        detail=entry.error or "",
    )
    return Send(entry.worker, message)
