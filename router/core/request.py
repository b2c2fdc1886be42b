"""One request at its router worker: its placement, tokens and attempts, and the table of its states. Pure; no messages.

WAITING      not placed: new and no pair of nodes can serve it yet, or its last attempt ended before the request did
PLACED       a Job names a prefill node; the worker waits for the hand-over
HANDED_OVER  one decode node owns the attempt
ENDED        the outcome is decided, once; later reports are dropped before they reach this table
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.table import Machine, Table
from kvferry.common.protocol.messages import Candidate
from kvferry.common.protocol.model_info import ModelInfo, TokenSource
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.router.api import GenerateRequest


class RequestState(Enum):
    """State of a request as its worker sees it."""

    WAITING = auto()
    PLACED = auto()
    HANDED_OVER = auto()
    ENDED = auto()


class RequestEvent(Enum):
    """What moves a request. All but END concern the current attempt only; reports of others are dropped before."""

    JOB_SENT = auto()
    """The request was placed and its Job sent."""
    FIRST_TOKEN = auto()
    """The prefill node's early copy of the first token."""
    DECODE_TOKENS = auto()
    """A decode candidate sent tokens: it owns the attempt, whether or not HandedOver arrived."""
    HANDED_OVER = auto()
    """The prefill node reports which decode node owns the attempt."""
    HANDOVER_FAILED = auto()
    """The prefill node reports that the attempt failed there."""
    NEVER_KNOWN = auto()
    """The prefill node never received the Job: it is sent again, unchanged."""
    LOST = auto()
    """The node of the attempt died, restarted, or reports that it dropped the request."""
    PREEMPTED = auto()
    """The decode node ran out of blocks."""
    END = auto()
    """Its last token arrived, its client disconnected, its deadline passed, no suitable nodes came in time, or it
    failed for good."""


_S, _E = RequestState, RequestEvent
REQUEST_TABLE = Table(
    "request",
    _S.WAITING,
    {
        (_S.WAITING, _E.JOB_SENT): _S.PLACED,
        (_S.WAITING, _E.END): _S.ENDED,
        (_S.PLACED, _E.FIRST_TOKEN): _S.PLACED,
        (_S.PLACED, _E.DECODE_TOKENS): _S.HANDED_OVER,
        (_S.PLACED, _E.HANDED_OVER): _S.HANDED_OVER,
        (_S.PLACED, _E.HANDOVER_FAILED): _S.WAITING,
        (_S.PLACED, _E.NEVER_KNOWN): _S.PLACED,
        (_S.PLACED, _E.LOST): _S.WAITING,
        (_S.PLACED, _E.END): _S.ENDED,
        (_S.HANDED_OVER, _E.FIRST_TOKEN): _S.HANDED_OVER,
        (_S.HANDED_OVER, _E.DECODE_TOKENS): _S.HANDED_OVER,
        (_S.HANDED_OVER, _E.HANDED_OVER): _S.HANDED_OVER,
        (_S.HANDED_OVER, _E.HANDOVER_FAILED): _S.HANDED_OVER,
        (_S.HANDED_OVER, _E.LOST): _S.WAITING,
        (_S.HANDED_OVER, _E.PREEMPTED): _S.WAITING,
        (_S.HANDED_OVER, _E.END): _S.ENDED,
    },
)


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes that an attempt was placed at."""

    placement_no: int
    prefill: Incarnation
    candidates: tuple[Candidate, ...]
    retry_tokens: int = 0
    """Tokens that an earlier attempt had computed already; 0 for the first attempt, and where their KV is held."""

    def has_candidate(self, node: Incarnation) -> bool:
        """Whether the node is one of the decode candidates."""
        return any(candidate.incarnation == node for candidate in self.candidates)


@dataclass(slots=True)
class Request:
    """What a worker knows of one request."""

    request_id: RequestId
    spec: RequestSpec
    """As it was accepted; `spec_now` has what was received since."""
    accepted_at: float
    deadline: float
    machine: Machine[RequestState, RequestEvent]
    vocab_size: int
    """Vocabulary of the model that its ids were checked against."""
    output_token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    """Output received by the worker, whether or not the client has it already."""
    attempt: int = 0
    base_index: int = 0
    """Output tokens that were known when the current attempt was placed."""
    losses: int = 0
    """Attempts lost since the request last made progress."""
    crashes: int = 0
    """Deaths of its decode node since the request last made progress."""
    setbacks: int = 0
    """Refusals and preemptions in a row: they cost no attempt, but are spaced by a backoff."""
    times_preempted: int = 0
    not_before: float = 0.0
    """Earliest time of the next placement."""
    placement: Placement | None = None
    token_source: TokenSource | None = None
    """What the nodes of the last placement compute tokens with."""
    waiting_since: float = 0.0
    """When an attempt last ended and the request became WAITING again."""
    holder: Incarnation | None = None
    """The prefill node that holds the KV of the last attempt for the next one, as far as the worker knows."""
    decode: Incarnation | None = None
    decode_sent_tokens: bool = False
    """The decode node sent tokens, so it has every piece."""
    resend: bool = False
    """Tokens are missing: the next heartbeat requests them again."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved the first attempt from computing."""
    prefill_name: str = ""
    decode_name: str = ""

    @classmethod
    def new(cls, asked: GenerateRequest, vocab_size: int, now: float) -> "Request":
        """A request that was just accepted."""
        machine = Machine(REQUEST_TABLE, asked.request_id[:8])
        return cls(asked.request_id, asked.spec, now, now + asked.timeout_s, machine, vocab_size)

    def spec_now(self) -> RequestSpec:
        """The facts of the request with the output that the worker has received."""
        return msgspec.structs.replace(
            self.spec, output_token_ids=self.output_token_ids[:], times_preempted=self.times_preempted
        )

    @property
    def state(self) -> RequestState:
        return self.machine.state

    @property
    def is_new(self) -> bool:
        """Whether it has had no attempt: it waits for its first pair of nodes."""
        return self.attempt == 0

    @property
    def next_index(self) -> int:
        """The first output index that is not known."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and known output tokens: what an attempt placed now starts with."""
        return len(self.spec.prompt_token_ids) + self.next_index

    @property
    def most_tokens(self) -> int:
        """Longest possible prompt and output together."""
        return len(self.spec.prompt_token_ids) + self.spec.sampling.max_new_tokens

    def fits(self, model: ModelInfo, source: TokenSource) -> bool:
        """Whether such a node can do all of the request: it has the length and the vocabulary, and after known output
        tokens it continues as the node that produced them would."""
        return (
            self.most_tokens <= model.max_model_len
            and self.vocab_size <= model.vocab_size
            and (not self.next_index or source == self.token_source)
        )

    @property
    def made_progress(self) -> bool:
        """Whether the attempt got beyond the token sampled by its prefill node: the decode node can run it."""
        return self.next_index > self.base_index + 1

    def note_cached(self, cached_tokens: int) -> None:
        """Record a node's count of cached tokens. A later attempt finds its own earlier work cached: no hit."""
        if self.attempt == 1:
            self.cached_tokens = cached_tokens

    def add_tokens(self, first_index: int, token_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        """Add the unknown ids of a chunk and return them: () if all are known, None if there is a gap before it."""
        known = self.next_index - first_index
        if known < 0:
            return None
        new_ids = token_ids[known:]
        self.output_token_ids.extend(new_ids)
        return new_ids

    def wanted_at(self) -> list[tuple[Incarnation, bool]]:
        """The nodes whose wanted set has the current attempt, and whether each is expected to have it by now."""
        if self.state is RequestState.HANDED_OVER and self.decode is not None:
            # Until the decode node sends tokens it may lack pieces: the prefill node must retain them until then.
            if self.placement is None or self.decode_sent_tokens or self.placement.prefill == self.decode:
                return [(self.decode, True)]
            return [(self.decode, True), (self.placement.prefill, False)]
        if self.state is RequestState.PLACED and self.placement is not None:
            prefill = self.placement.prefill
            others = [c.incarnation for c in self.placement.candidates if c.incarnation != prefill]
            return [(prefill, True), *((peer, False) for peer in others)]
        if self.state is RequestState.WAITING and self.holder is not None:
            return [(self.holder, False)]
        return []

    def check_invariants(self) -> None:
        """Raises InvariantError when state and placement disagree."""
        placed = self.state in (RequestState.PLACED, RequestState.HANDED_OVER)
        if placed and self.placement is None:
            raise InvariantError(f"request {self.request_id} is {self.state.name} without a placement")
        if (self.state is RequestState.HANDED_OVER) != (self.decode is not None):
            raise InvariantError(f"request {self.request_id} is {self.state.name} with decode {self.decode}")
        if self.holder is not None and self.state is not RequestState.WAITING:
            raise InvariantError(f"request {self.request_id} is {self.state.name} and its KV still held")
        if self.is_new and (self.state is not RequestState.WAITING or self.placement is not None or self.next_index):
            raise InvariantError(
                f"request {self.request_id} has no attempt and is {self.state.name} with {self.placement}"
            )
        if self.next_index > self.spec.sampling.max_new_tokens:
            raise InvariantError(f"request {self.request_id} has more output tokens than max_new_tokens")
