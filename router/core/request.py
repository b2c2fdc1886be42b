"""The one table that says what can happen to a request at its router worker. Pure.

WAITING  no plan: new and no pair of nodes can serve it yet, or its last attempt ended without an end of the request
PLACED   a Job names a prefill node; the worker waits for the hand-over
HANDED   one decode node owns the attempt
ENDED    the outcome is decided, once; whatever comes later is dropped before this table is asked

One request at its worker: its plan, the tokens it holds, its attempts. Pure data with small rules; no messages.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import (
    Incarnation,
    RequestId,
)
from kvferry.common.cluster.table import Machine, Table
from kvferry.common.protocol.messages import (
    Candidate,
    FinishReason,
)
from kvferry.common.protocol.model_info import (
    ModelInfo,
    TokenSource,
)
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams


class RequestState(Enum):
    """Where a request is, as its worker sees it."""

    WAITING = auto()
    PLACED = auto()
    HANDED = auto()
    ENDED = auto()


class RequestEvent(Enum):
    """What moves a request. All but END concern the current attempt only; others are dropped before."""

    PLAN = auto()
    """A plan was made and its Job sent."""
    FIRST_TOKEN = auto()
    """The prefill node's early copy of the first token."""
    DECODE_TOKENS = auto()
    """A decode node of the plan sent tokens: it owns the attempt, whether or not HandedOver came."""
    HANDED_OVER = auto()
    """The prefill node says which decode node owns the attempt."""
    HANDOVER_FAILED = auto()
    """The prefill node can go no further with it."""
    NEVER_KNOWN = auto()
    """The prefill node never saw the Job: it is sent again, unchanged."""
    LOST = auto()
    """The node that had it died, restarted, or says that it is gone."""
    PREEMPTED = auto()
    """The decode node ran out of blocks."""
    END = auto()
    """Its last token came, its client left, its deadline passed, no nodes came in time that could do it, or it
    failed for good."""


_S, _E = RequestState, RequestEvent
REQUEST_TABLE = Table(
    "request",
    _S.WAITING,
    {
        (_S.WAITING, _E.PLAN): _S.PLACED,
        (_S.WAITING, _E.END): _S.ENDED,
        (_S.PLACED, _E.FIRST_TOKEN): _S.PLACED,
        (_S.PLACED, _E.DECODE_TOKENS): _S.HANDED,
        (_S.PLACED, _E.HANDED_OVER): _S.HANDED,
        (_S.PLACED, _E.HANDOVER_FAILED): _S.WAITING,
        (_S.PLACED, _E.NEVER_KNOWN): _S.PLACED,
        (_S.PLACED, _E.LOST): _S.WAITING,
        (_S.PLACED, _E.END): _S.ENDED,
        (_S.HANDED, _E.FIRST_TOKEN): _S.HANDED,
        (_S.HANDED, _E.DECODE_TOKENS): _S.HANDED,
        (_S.HANDED, _E.HANDED_OVER): _S.HANDED,
        (_S.HANDED, _E.HANDOVER_FAILED): _S.HANDED,
        (_S.HANDED, _E.LOST): _S.WAITING,
        (_S.HANDED, _E.PREEMPTED): _S.WAITING,
        (_S.HANDED, _E.END): _S.ENDED,
    },
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which nodes an attempt names."""

    placement_no: int
    prefill: Incarnation
    candidates: tuple[Candidate, ...]
    retry_tokens: int = 0
    """Tokens that an earlier attempt had computed as well; none on the first attempt, nor where their KV is held."""

    def names(self, node: Incarnation) -> bool:
        """Whether the node is one of the plan's decode candidates."""
        return any(candidate.incarnation == node for candidate in self.candidates)


@dataclass(slots=True)
class Request:
    """Everything a worker knows of one request."""

    request_id: RequestId
    model: str
    prompt_token_ids: "array[int]"
    sampling: SamplingParams
    priority: int
    accepted_at: float
    deadline: float
    machine: Machine[RequestState, RequestEvent]
    vocab_size: int
    """Of the model that its ids were checked by."""
    output_token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    """What the worker holds, sent on to the client or not."""
    attempt: int = 0
    base_index: int = 0
    """Tokens held when the present attempt was planned."""
    losses: int = 0
    crashes: int = 0
    """Losses, and deaths of the node that decoded it, since it last made progress."""
    setbacks: int = 0
    """Refusals and preemptions in a row: they cost no attempt, but are spaced by a backoff."""
    times_preempted: int = 0
    not_before: float = 0.0
    plan: Placement | None = None
    source: TokenSource | None = None
    """What the nodes of the last plan compute with."""
    waiting_since: float = 0.0
    """When it last became one that waits for a plan."""
    holder: Incarnation | None = None
    """The prefill node that keeps the KV of the last attempt for the next one, as far as is known."""
    decode: Incarnation | None = None
    decode_spoke: bool = False
    """Tokens came from it: it has every piece."""
    resend: bool = False
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared its first attempt."""
    finish: FinishReason | None = None
    finish_count: int | None = None
    """Number of output tokens at which the finish applies."""
    prefill_name: str = ""
    decode_name: str = ""

    @classmethod
    def new(
        cls,
        request_id: RequestId,
        model: str,
        prompt_token_ids: "array[int]",
        sampling: SamplingParams,
        priority: int,
        now: float,
        timeout_s: float,
        vocab_size: int,
    ) -> "Request":
        """A request just accepted."""
        machine = Machine(REQUEST_TABLE, request_id[:8])
        deadline = now + timeout_s
        return cls(request_id, model, prompt_token_ids, sampling, priority, now, deadline, machine, vocab_size)

    def spec_now(self) -> RequestSpec:
        """The facts of the request with what the worker holds by now."""
        return RequestSpec(
            model=self.model,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids[:],
            sampling=self.sampling,
            priority=self.priority,
            times_preempted=self.times_preempted,
        )

    @property
    def state(self) -> RequestState:
        """The present state."""
        return self.machine.state

    @property
    def is_new(self) -> bool:
        """It has no attempt yet: it waits for its first pair of nodes."""
        return self.attempt == 0

    @property
    def next_index(self) -> int:
        """The first output index that is not held."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """All ids that an attempt planned now begins with."""
        return len(self.prompt_token_ids) + self.next_index

    @property
    def most_tokens(self) -> int:
        """Prompt and output at their longest."""
        return len(self.prompt_token_ids) + self.sampling.max_new_tokens

    def fits(self, model: ModelInfo, source: TokenSource) -> bool:
        """Whether such a node can do all of it: has the room, knows the ids, and goes on with the tokens that it holds
        as whoever drew them would."""
        return (
            self.most_tokens <= model.max_model_len
            and self.vocab_size <= model.vocab_size
            and (not self.next_index or source == self.source)
        )

    @property
    def made_progress(self) -> bool:
        """The attempt went beyond the token that its prefill node drew: the decode node can run it."""
        return self.next_index > self.base_index + 1

    def note_cached(self, cached_tokens: int) -> None:
        """What a node says with tokens. A later attempt finds what the request itself has computed: that is no hit."""
        if self.attempt == 1:
            self.cached_tokens = cached_tokens

    def take(self, first_index: int, token_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        """Add what is new of a chunk. Returns the new ids, () when all are known, None when there is a gap before."""
        known = self.next_index - first_index
        if known < 0:
            return None
        fresh = token_ids[known:]
        self.output_token_ids.extend(fresh)
        return fresh

    def wanted_at(self) -> list[tuple[Incarnation, bool]]:
        """The nodes that shall have the present attempt, and whether each one is expected to have it by now."""
        if self.state is RequestState.HANDED and self.decode is not None:
            # Until the decode node speaks it may lack pieces: the prefill node keeps them for it so long.
            source = self.plan.prefill if self.plan is not None and not self.decode_spoke else self.decode
            return [(self.decode, True), *([(source, False)] if source != self.decode else [])]
        if self.state is RequestState.PLACED and self.plan is not None:
            others = [c.incarnation for c in self.plan.candidates if c.incarnation != self.plan.prefill]
            return [(self.plan.prefill, True), *((peer, False) for peer in others)]
        if self.state is RequestState.WAITING and self.holder is not None:
            return [(self.holder, False)]
        return []

    def check_invariants(self) -> None:
        """Raises InvariantError when state and plan disagree."""
        placed = self.state in (RequestState.PLACED, RequestState.HANDED)
        if placed and self.plan is None:
            raise InvariantError(f"request {self.request_id} is {self.state.name} without a plan")
        if (self.state is RequestState.HANDED) != (self.decode is not None):
            raise InvariantError(f"request {self.request_id} is {self.state.name} with decode {self.decode}")
        if self.holder is not None and self.state is not RequestState.WAITING:
            raise InvariantError(f"request {self.request_id} is {self.state.name} and its KV still held")
        if self.is_new and (self.state is not RequestState.WAITING or self.plan is not None or self.next_index):
            raise InvariantError(f"request {self.request_id} has no attempt and is {self.state.name} with {self.plan}")
        if self.next_index > self.sampling.max_new_tokens:
            raise InvariantError(f"request {self.request_id} holds more tokens than it may")
