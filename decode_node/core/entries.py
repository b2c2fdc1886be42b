"""All entries of the decode leg: found by plan, by transfer key, by sequence; and how one ends. Pure.

An entry's blocks are the scheduler's sequence. Writing for a key is stopped before its blocks may go, in order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.common.errors import InvariantError
from kvferry.common.ids import Incarnation, PlanKey, TransferKey
from kvferry.common.protocol.messages import Gone, Refused, Revoke
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.state.actions import Action, ForgetPieces, Send
from kvferry.common.state.handover_receive import ReceiveEvent, ReceiveState
from kvferry.common.state.staging_slots import StagingSlots
from kvferry.decode_node.core.entry import Entry


@dataclass(slots=True)
class EntryTable:
    """See the module's docstring."""

    scheduler: Scheduler
    staging: StagingSlots
    by_plan: dict[PlanKey, Entry] = field(default_factory=dict)
    by_key: dict[TransferKey, Entry] = field(default_factory=dict)
    by_seq: dict[int, Entry] = field(default_factory=dict)
    queued: dict[TransferKey, Entry] = field(default_factory=dict)
    """Reservations that wait for room."""

    def __iter__(self) -> Iterator[Entry]:
        """A copy: entries may be dropped meanwhile."""
        return iter(list(self.by_plan.values()))

    def add(self, entry: Entry) -> None:
        """A new one, without blocks yet."""
        self.by_plan[entry.plan_key] = self.by_key[entry.key] = entry

    def attach(self, entry: Entry, seq_id: int) -> None:
        """It has blocks now."""
        entry.seq_id = seq_id
        self.by_seq[seq_id] = entry

    def detach(self, entry: Entry) -> None:
        """The scheduler no longer has its sequence."""
        if entry.seq_id is not None:
            del self.by_seq[entry.seq_id]
            entry.seq_id = None

    def drop(self, entry: Entry, now: float) -> list[Action]:
        """Leave no trace of it."""
        actions = self._end_sequence(entry, now)
        self.queued.pop(entry.key, None)
        self.by_plan.pop(entry.plan_key, None)
        self.by_key.pop(entry.key, None)
        return actions

    def take_back(self, entry: Entry, answer: Revoke | Refused, now: float) -> list[Action]:
        """It is not kept, and its prefill node is told so. Remembered until that no longer lists it: the Reserve may
        come once more."""
        actions = self._end_sequence(entry, now)
        self.queued.pop(entry.key, None)
        entry.ledger, entry.taken_back = None, answer
        entry.machine.move(ReceiveEvent.TAKE_BACK, now)
        return [*actions, Send(entry.key.prefill, answer)]

    def lose(self, entry: Entry, why: str, now: float) -> list[Action]:
        """It cannot go on here: a record is left, and its worker is told."""
        actions = self._end_sequence(entry, now)
        entry.error = why
        entry.machine.move(ReceiveEvent.LOSE, now)
        return [*actions, gone(entry)]

    def give_back(self, entry: Entry, now: float) -> list[Action]:
        """It goes on elsewhere: a record is left, and its worker is told."""
        actions = self._end_sequence(entry, now)
        entry.machine.move(ReceiveEvent.GIVE_BACK, now)
        return [*actions, gone(entry)]

    def stop_writing(self, entry: Entry, now: float) -> list[Action]:
        """No piece is written for it any more. Its staging slots are free if every write was confirmed, by the Commit;
        else they rest."""
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
        """Those of a worker, or of a prefill node while these are open."""
        return [e for e in self if e.worker == client or (e.key.prefill == client and e.is_open)]

    def check_invariants(self) -> None:
        """Raises InvariantError when the indexes disagree."""
        self.staging.check_invariants()
        if {id(e) for e in self.by_plan.values()} != {id(e) for e in self.by_key.values()}:
            raise InvariantError("decode entries are not indexed by transfer key")
        for plan_key, entry in self.by_plan.items():
            entry.check_invariants()
            if entry.plan_key != plan_key:
                raise InvariantError(f"{entry.key} is filed under {plan_key}")
            if (entry.key in self.queued) != (entry.state is ReceiveState.QUEUED):
                raise InvariantError(f"{entry.key} is {entry.state.name} but the queue disagrees")
            if entry.seq_id is not None and self.by_seq.get(entry.seq_id) is not entry:
                raise InvariantError(f"{entry.key} is not indexed by its sequence")
        if len(self.by_seq) != sum(1 for e in self.by_plan.values() if e.seq_id is not None):
            raise InvariantError("sequences of no entry are indexed")


def gone(entry: Entry) -> Send:
    """What its worker is told of an entry that was lost or given back."""
    given_back = entry.state is ReceiveState.GIVEN_BACK
    message = Gone(
        request_id=entry.key.request_id,
        attempt=entry.key.attempt,
        reason="given_back" if given_back else "lost",
        detail=entry.error or "",
    )
    return Send(entry.worker, message)
