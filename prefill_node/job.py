"""One job on the prefill node, from the queue to its end, and what the node replies to its worker about it. Pure.

QUEUED     waits for blocks and its turn
COMPUTING  has blocks for all its tokens; chunks are computed while a decode node is asked for a reservation
COMPUTED   its next token is known; the hand-over continues
HANDED     a decode node owns the request; blocks stay until that node has every piece
FINISHED   the first token ended it
FAILED     no hand-over: the worker places the request again; the KV may be retained for a next attempt here
PREEMPTED  the drain took too long: the worker places the request elsewhere
The last four are ended: kept to be reported again, until the worker's wanted set drops the request.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import AttemptKey, Incarnation
from kvferry.common.cluster.actions import Action, Send
from kvferry.common.cluster.table import Machine, Table
from kvferry.common.protocol.messages import FirstToken, Gone, HandedOver, HandoverFailed, Job
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
    """What moves a job. Removal from the table (cancel, no longer wanted) needs no row."""

    START = auto()
    """It has blocks for all its tokens."""
    PREFILLED = auto()
    """The prompt is computed and the next token is known."""
    FINISH = auto()
    """The first token is the last one."""
    HAND_OVER = auto()
    """A decode node owns the request."""
    FAIL = auto()
    """No hand-over: no room, a loss, the deadline, or no token could be sampled."""
    PREEMPT = auto()
    """The drain took too long."""


_S, _E = JobState, JobEvent
LIVE = (_S.QUEUED, _S.COMPUTING, _S.COMPUTED)
JOB_TABLE = Table(
    "job",
    _S.QUEUED,
    {
        (_S.QUEUED, _E.START): _S.COMPUTING,
        (_S.COMPUTING, _E.PREFILLED): _S.COMPUTED,
        (_S.COMPUTING, _E.FINISH): _S.FINISHED,
        (_S.COMPUTED, _E.FINISH): _S.FINISHED,
        (_S.COMPUTED, _E.HAND_OVER): _S.HANDED,
        **{(state, _E.FAIL): _S.FAILED for state in LIVE},
        **{(state, _E.PREEMPT): _S.PREEMPTED for state in LIVE},
        (_S.FAILED, _E.PREFILLED): _S.FAILED,
        (_S.FAILED, _E.FAIL): _S.FAILED,
    },
)
ENDED = (_S.HANDED, _S.FINISHED, _S.FAILED, _S.PREEMPTED)


@dataclass(slots=True)
class PrefillJob:
    """What the prefill role keeps of one attempt of one request."""

    worker: Incarnation
    message: Job
    sequence: SequenceSpec
    """What the scheduler was given."""
    deadline: float
    machine: Machine[JobState, JobEvent] = field(init=False)
    seq_id: int | None = None
    pin_seq: int | None = None
    """The sequence that it had, while the transport may still read its blocks."""
    sender: HandoverSender | None = None
    first_token: FirstToken | None = None
    failure: HandoverFailed | None = None
    cached_tokens: int = 0
    num_blocks: int = 0
    pinned: bool = False
    """The transport may read its blocks."""
    delisted: bool = False
    """The worker does not want it any more; it stays only until the transport has read its blocks."""
    paused_since: float | None = None
    """Since when no step has had a chunk of it, as far as was checked."""
    num_releases: int = 0
    """How often it released its reservation in a pause."""
    retained_until: float = 0.0
    """When KV that is retained for a next attempt is released."""

    def __post_init__(self) -> None:
        self.machine = Machine(JOB_TABLE, f"{self.message.request_id[:8]}/{self.message.attempt}")

    @property
    def attempt_key(self) -> AttemptKey:
        """What the worker knows it by."""
        return AttemptKey(self.message.request_id, self.message.attempt)

    @property
    def state(self) -> JobState:
        return self.machine.state

    @property
    def has_ended(self) -> bool:
        """Kept only to be reported again."""
        return self.state in ENDED

    @property
    def stays(self) -> bool:
        """Decodes in this process; no decode node is asked."""
        return self.sequence.mode == "decode"

    @property
    def needs_handover(self) -> bool:
        """False when it decodes here, or when its first token is its last."""
        return not self.stays and self.message.spec.num_left_tokens > 1

    @property
    def ungranted(self) -> bool:
        """Holds blocks without a grant of a decode node. A job that decodes here needs none."""
        granted = self.stays or (self.sender is not None and self.sender.granted)
        return self.seq_id is not None and self.num_blocks > 0 and not granted

    def check_invariants(self) -> None:
        """Raises InvariantError when state and parts disagree."""
        if self.state in LIVE and not self.delisted and self.seq_id is None:
            raise InvariantError(f"{self.attempt_key} is {self.state.name} without a sequence")
        if self.pinned != (self.sender is not None and self.sender.is_reading):
            raise InvariantError(f"{self.attempt_key}: pinned is {self.pinned}, but the transport says otherwise")
        if self.delisted and self.seq_id is not None:
            raise InvariantError(f"{self.attempt_key} is not wanted and still has a sequence")
        if self.stays and (self.sender is not None or self.state is JobState.HANDED):
            raise InvariantError(f"{self.attempt_key} decodes here and is handed over")
        if self.sender is not None:
            self.sender.check_invariants()


# -- replies to workers


def failed(job: Job, reason: str, *, detail: str = "", retryable: bool = True) -> HandoverFailed:
    """The attempt has ended here without a hand-over."""
    return HandoverFailed(
        request_id=job.request_id, attempt=job.attempt, reason=reason, detail=detail, retryable=retryable
    )


def failed_with(job: PrefillJob, message: HandoverFailed, *, retained: bool, commit_sent: bool) -> HandoverFailed:
    """The same, with the state of its hand-over."""
    key = job.sender.key if job.sender is not None else None
    decode = key.decode if key is not None else None
    return msgspec.structs.replace(message, retained=retained, commit_sent=commit_sent, decode=decode)


def handed_over(job: PrefillJob) -> Send:
    """A decode node owns the request."""
    assert job.sender is not None
    assert job.sender.key is not None
    return Send(job.worker, handed_over_to(job.message, job.sender.key.decode))


def handed_over_to(job: Job, decode: Incarnation) -> HandedOver:
    """This decode node owns the request."""
    return HandedOver(request_id=job.request_id, attempt=job.attempt, decode=decode)


def preempted(job: PrefillJob) -> Send:
    """The request is to be placed elsewhere; that costs it no attempt."""
    return Send(job.worker, Gone(request_id=job.message.request_id, attempt=job.message.attempt, reason="preempted"))


def state_reply(job: PrefillJob, next_index: int, resend: bool) -> list[Action]:
    """The reply to a worker that expects the request here: its end, or the token that the worker lacks."""
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
