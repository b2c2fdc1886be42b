"""One request on the decode node, from its reservation to the record of its end. Plain state with small rules."""

from array import array
from dataclasses import dataclass, field

from kvferry.common.errors import InvariantError
from kvferry.common.ids import Incarnation, PlanKey, TransferKey
from kvferry.common.protocol.messages import Commit, FinishReason, Refused, Reserve, Revoke
from kvferry.common.scheduling.sequence import SequenceSpec
from kvferry.common.state.handover_receive import (
    HOLDS_BLOCKS,
    RECEIVE_TABLE,
    RECORDS,
    PieceLedger,
    ReceiveEvent,
    ReceiveState,
)
from kvferry.common.state.leg import ComputedHere
from kvferry.common.state.table import Machine


@dataclass(slots=True)
class Entry:
    """What the decode leg knows of one attempt of one request."""

    key: TransferKey
    worker: Incarnation
    plan_no: int
    transfer_no: int
    spec: SequenceSpec
    deadline: float
    output_token_ids: "array[int]"
    """All output ids of the request, earlier attempts' included."""
    machine: Machine[ReceiveState, ReceiveEvent] = field(init=False)
    seq_id: int | None = None
    ledger: PieceLedger | None = None
    staged: bool = False
    """Its sender can write into staging slots."""
    taken_back: Revoke | Refused | None = None
    """What its prefill node was told, and is told again, when the reservation was not kept."""
    commit: Commit | None = None
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared where the prompt was computed."""
    finish: FinishReason | None = None
    error: str | None = None
    queued_at: float = 0.0

    def __post_init__(self) -> None:
        self.machine = Machine(RECEIVE_TABLE, f"{self.key.request_id[:8]}/{self.key.attempt}.{self.key.generation}")

    @classmethod
    def from_reserve(cls, message: Reserve, now: float, grace_s: float) -> "Entry":
        """A reservation as asked for. Times become local ones here."""
        known = message.prompt_token_ids + message.output_token_ids
        spec = SequenceSpec(
            token_ids=known,
            num_prompt_tokens=len(message.prompt_token_ids),
            sampling=message.sampling,
            priority=message.priority,
            accepted_at=now - message.waited_ms / 1000,
            mode="decode",
            times_preempted=message.times_preempted,
        )
        deadline = now + message.remaining_ms / 1000 + grace_s
        return cls(
            key=message.key,
            worker=message.worker,
            plan_no=message.plan_no,
            transfer_no=message.transfer_no,
            spec=spec,
            deadline=deadline,
            output_token_ids=message.output_token_ids[:],
            queued_at=now,
            staged=message.staged,
        )

    @classmethod
    def from_here(cls, computed: ComputedHere) -> "Entry":
        """A request that this process has computed itself: an entry without a transfer."""
        return cls(
            key=computed.key,
            worker=computed.worker,
            plan_no=computed.plan_no,
            transfer_no=0,
            spec=computed.spec,
            deadline=computed.deadline,
            output_token_ids=computed.output_token_ids[:],
            cached_tokens=computed.cached_tokens,
        )

    @property
    def plan_key(self) -> PlanKey:
        """What the worker knows it by."""
        return PlanKey(self.key.request_id, self.key.attempt)

    @property
    def state(self) -> ReceiveState:
        """The present state."""
        return self.machine.state

    @property
    def computed_here(self) -> bool:
        """Nothing was or will be transferred for it."""
        return self.key.prefill == self.key.decode

    @property
    def is_record(self) -> bool:
        """Ended here: kept only to be told again."""
        return self.state in RECORDS

    @property
    def is_open(self) -> bool:
        """Not committed: it is there for its prefill node, as long as that lists it."""
        return self.state in (ReceiveState.QUEUED, ReceiveState.RESERVED, ReceiveState.TAKEN_BACK)

    def check_invariants(self) -> None:
        """Raises InvariantError when state and holdings disagree."""
        holds = self.seq_id is not None
        if holds != (self.state in HOLDS_BLOCKS):
            raise InvariantError(f"{self.key} is {self.state.name} with sequence {self.seq_id}")
        if (self.taken_back is not None) != (self.state is ReceiveState.TAKEN_BACK):
            raise InvariantError(f"{self.key} is {self.state.name} and was told {self.taken_back}")
        owned = self.state in (ReceiveState.OWNED, ReceiveState.RUNNING)
        if owned and (self.commit is None) != self.computed_here:
            raise InvariantError(f"{self.key} is {self.state.name} and its Commit is {self.commit}")
