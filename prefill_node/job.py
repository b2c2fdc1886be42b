"""One job on the prefill node, from the queue to the record of its end. Plain state with a table; no messages.

QUEUED     waits for blocks and its turn
COMPUTING  has blocks for all its tokens; chunks are computed while a decode node is asked for room
COMPUTED   its next token is known; the hand-over goes on
HANDED     a decode node owns the request; blocks stay until that node has every piece, or the worker heard it speak
FINISHED   the first token ended it
FAILED     no hand-over: the worker plans again; the KV may be held for a next attempt here
PREEMPTED the drain took too long: the worker plans it again elsewhere
The last four are records, kept until the worker's list no longer has them.

What the prefill role tells workers of their jobs. Pure: makes messages, changes nothing.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import (
    AttemptKey,
    Incarnation,
)
from kvferry.common.cluster.actions import (
    Action,
    Send,
)
from kvferry.common.cluster.table import (
    Machine,
    Table,
)
from kvferry.common.protocol.messages import (
    FinishReason,
    FirstToken,
    Gone,
    HandedOver,
    HandoverFailed,
    Job,
)
from kvferry.common.scheduling.sequence import SequenceSpec
from kvferry.prefill_node.handover import HandoverSender


class JobState(Enum):
    """Where a job is."""

    QUEUED = auto()
    COMPUTING = auto()
    COMPUTED = auto()
    HANDED = auto()
    FINISHED = auto()
    FAILED = auto()
    PREEMPTED = auto()


class JobEvent(Enum):
    """What moves a job. Leaving the table altogether (reaping, cancel) needs no row."""

    START = auto()
    """It got blocks for all its tokens."""
    PREFILLED = auto()
    """All is computed and the next token is known."""
    FINISH = auto()
    """The first token is the last one."""
    HAND_OVER = auto()
    """A decode node said that it owns the request."""
    FAIL = auto()
    """No hand-over: no room, a loss, the deadline, or no token could be drawn."""
    PREEMPT = auto()
    """The drain took too long."""


_S, _E = JobState, JobEvent
_LIVE = (_S.QUEUED, _S.COMPUTING, _S.COMPUTED)
JOB_TABLE = Table(
    "job",
    _S.QUEUED,
    {
        (_S.QUEUED, _E.START): _S.COMPUTING,
        (_S.COMPUTING, _E.PREFILLED): _S.COMPUTED,
        (_S.COMPUTING, _E.FINISH): _S.FINISHED,
        (_S.COMPUTED, _E.FINISH): _S.FINISHED,
        (_S.COMPUTED, _E.HAND_OVER): _S.HANDED,
        **{(state, _E.FAIL): _S.FAILED for state in _LIVE},
        **{(state, _E.PREEMPT): _S.PREEMPTED for state in _LIVE},
        (_S.FAILED, _E.PREFILLED): _S.FAILED,
        (_S.FAILED, _E.FAIL): _S.FAILED,
    },
)
ENDED = (_S.HANDED, _S.FINISHED, _S.FAILED, _S.PREEMPTED)


@dataclass(slots=True)
class PrefillJob:
    """What the prefill role knows of one attempt of one request."""

    worker: Incarnation
    job: Job
    spec: SequenceSpec
    deadline: float
    machine: Machine[JobState, JobEvent] = field(init=False)
    seq_id: int | None = None
    pin_seq: int | None = None
    """The sequence that it had, while the transport may still read its blocks."""
    sender: HandoverSender | None = None
    first_token: FirstToken | None = None
    finish: FinishReason | None = None
    failure: HandoverFailed | None = None
    cached_tokens: int = 0
    num_blocks: int = 0
    pinned: bool = False
    delisted: bool = False
    """The worker wants no more of it; it stays only until the transport is done with its blocks."""
    paused_since: float | None = None
    """Since when no step has had anything of it, as far as was looked."""
    num_releases: int = 0
    """How often it gave its reservation back in a pause."""
    until: float = 0.0
    """Held KV, or source blocks of a hand-over that is not complete yet, are let go then."""

    def __post_init__(self) -> None:
        self.machine = Machine(JOB_TABLE, f"{self.job.request_id[:8]}/{self.job.attempt}")

    @property
    def attempt_key(self) -> AttemptKey:
        """What the worker knows it by."""
        return AttemptKey(self.job.request_id, self.job.attempt)

    @property
    def state(self) -> JobState:
        """The present state."""
        return self.machine.state

    @property
    def is_record(self) -> bool:
        """Ended here: kept only to be told again."""
        return self.state in ENDED

    @property
    def stays(self) -> bool:
        """It goes on in this process; no decode node is asked."""
        return self.spec.mode == "decode"

    @property
    def needs_handover(self) -> bool:
        """False when it stays, or the first token is the last one."""
        return not self.stays and self.job.sampling.max_new_tokens - len(self.job.output_token_ids) > 1

    @property
    def ungranted(self) -> bool:
        """Holds blocks, and no decode node has said yes. One that stays had its answer when it started."""
        granted = self.stays or (self.sender is not None and self.sender.granted)
        return self.seq_id is not None and self.num_blocks > 0 and not granted

    def check_invariants(self) -> None:
        """Raises InvariantError when state and parts disagree."""
        if self.state in _LIVE and not self.delisted and self.seq_id is None:
            raise InvariantError(f"{self.attempt_key} is {self.state.name} without a sequence")
        if self.pinned != (self.sender is not None and self.sender.pieces_in_flight > 0):
            raise InvariantError(f"{self.attempt_key}: pinned is {self.pinned}, but pieces in flight say otherwise")
        if self.delisted and self.seq_id is not None:
            raise InvariantError(f"{self.attempt_key} is not wanted and still has a sequence")
        if self.stays and (self.sender is not None or self.state is JobState.HANDED):
            raise InvariantError(f"{self.attempt_key} stays here and is handed over")
        if self.sender is not None:
            self.sender.check_invariants()


def failed(job: Job, reason: str, *, detail: str = "", retryable: bool = True) -> HandoverFailed:
    """This attempt goes no further here."""
    return HandoverFailed(
        request_id=job.request_id, attempt=job.attempt, reason=reason, detail=detail, retryable=retryable
    )


def failed_with(job: PrefillJob, message: HandoverFailed, *, held: bool, commit_sent: bool) -> HandoverFailed:
    """The same, with what became of its hand-over."""
    key = job.sender.key if job.sender is not None else None
    decode = key.decode if key is not None else None
    return msgspec.structs.replace(message, held=held, commit_sent=commit_sent, decode=decode)


def handed_over(job: PrefillJob) -> Send:
    """A decode node owns it."""
    assert job.sender is not None
    assert job.sender.key is not None
    return Send(job.worker, handed_over_to(job.job, job.sender.key.decode))


def handed_over_to(job: Job, decode: Incarnation) -> HandedOver:
    """The news that this node owns it."""
    return HandedOver(request_id=job.request_id, attempt=job.attempt, decode=decode)


def preempted(job: PrefillJob) -> Send:
    """It is to be planned again elsewhere, at no cost."""
    return Send(job.worker, Gone(request_id=job.job.request_id, attempt=job.job.attempt, reason="preempted"))


def state(job: PrefillJob, next_index: int, resend: bool) -> list[Action]:
    """The answer to a worker's list that expects it: its end, or tokens that the worker lacks."""
    if job.state is JobState.HANDED:
        return [handed_over(job)]
    if job.state is JobState.FAILED and job.failure is not None:
        return [Send(job.worker, job.failure)]
    if job.state is JobState.PREEMPTED:
        return [preempted(job)]
    missed = job.first_token is not None and job.first_token.index >= next_index
    if missed and (resend or job.state is JobState.FINISHED):
        assert job.first_token is not None
        return [Send(job.worker, job.first_token)]
    return []
