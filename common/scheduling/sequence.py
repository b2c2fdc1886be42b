"""Settings of the scheduler. Plain data; named as in the cluster file.

One sequence on one node: what it is (`SequenceSpec`), how far it is (`Sequence`), what may follow what.

Plain state with a transition table; it decides nothing about other sequences and owns no blocks.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from kvferry.common.base.errors import ConfigError, InvariantError
from kvferry.common.kv.block_pool import AllocationMemo
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.events import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of one node's scheduler. Shares are of the pool's blocks."""

    eos_token_ids: frozenset[int] = frozenset()
    """The model's own."""
    vocab_size: int = 2**32
    """Ids at or beyond it have no row in the model's tables: a sequence with one is refused."""
    max_step_tokens: int = 512
    """Token budget of one step: decode tokens first, the rest for prompt chunks."""
    max_chunk_tokens: int = 0
    """Most tokens of one prompt in a step while others want some too; 0: no such bound."""
    max_running: int = 256
    """Sequences that compute, decode, or are reserved, together."""
    max_steps_in_flight: int = 1
    """From 2 on the next step of what decodes is planned while its token is being drawn."""
    aging_s: float = 10.0
    """Waiting this long raises a sequence by one priority class."""
    max_preemptions: int = 3
    """A request that was given back this often is not given back again."""
    swap_wait_s: float = 2.0
    """A swapped-out sequence that gets no blocks for this long is given back."""
    reserved_share: float = 0.5
    """Uncommitted reservations hold no more than this (a single one may, when it is alone)."""
    watermark_blocks_share: float = 0.02
    """Kept free while sequences decode, so that these can grow; rounded up to whole blocks."""

    def __post_init__(self) -> None:
        if min(self.max_step_tokens, self.max_running, self.max_steps_in_flight, self.vocab_size) < 1:
            raise ConfigError("max_step_tokens, max_running, max_steps_in_flight, vocab_size must be at least 1")
        if self.max_running > self.max_step_tokens:
            raise ConfigError(
                f"max_running ({self.max_running}) must not exceed max_step_tokens ({self.max_step_tokens}): "
                "prompts would get no share of a step"
            )
        if self.max_chunk_tokens < 0 or self.max_preemptions < 0:
            raise ConfigError("max_chunk_tokens and max_preemptions must not be negative")
        if self.aging_s <= 0 or self.swap_wait_s <= 0:
            raise ConfigError("aging_s and swap_wait_s must be positive")
        if not (0 < self.reserved_share <= 1 and 0 <= self.watermark_blocks_share < 1):
            raise ConfigError("reserved_share must lie in (0, 1], watermark_blocks_share in [0, 1)")


Mode = Literal["prefill", "decode"]
"""prefill: compute all known ids, draw one token, stop and hold the blocks. decode: go on to the end."""


class SequenceStatus(Enum):
    """Where a sequence stands. All but WAITING and SWAPPED hold blocks; ENDED ones only until nobody touches these
    any more."""

    WAITING = "waiting"
    """In the queue, without blocks."""
    COMPUTING = "computing"
    """Has blocks for all known ids; these are being computed in chunks."""
    PAUSED = "paused"
    """Like COMPUTING, but gets no chunk until it is resumed."""
    PREFILLED = "prefilled"
    """Computed, with a token to go on from; holds its blocks until told what next."""
    RESERVED = "reserved"
    """Decode role: blocks are kept for KV that another node sends."""
    COMMITTED = "committed"
    """Decode role: owned for good; KV may still be on its way."""
    DECODING = "decoding"
    """Gets one token a step."""
    SWAPPING = "swapping"
    """Its KV is being copied to the host by a step in flight; the device's blocks are still its own."""
    SWAPPED = "swapped"
    """Its KV is in host blocks alone; it waits for blocks of the device."""
    ENDED = "ended"
    """Finished, failed, aborted, released or given back; waits for the step in flight or for an unpin."""


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.COMPUTING, SequenceStatus.PREFILLED, SequenceStatus.ENDED}),
    SequenceStatus.COMPUTING: frozenset(
        {SequenceStatus.PAUSED, SequenceStatus.PREFILLED, SequenceStatus.DECODING, SequenceStatus.ENDED}
    ),
    SequenceStatus.PAUSED: frozenset(
        {SequenceStatus.COMPUTING, SequenceStatus.PREFILLED, SequenceStatus.DECODING, SequenceStatus.ENDED}
    ),
    SequenceStatus.PREFILLED: frozenset({SequenceStatus.ENDED}),
    SequenceStatus.RESERVED: frozenset({SequenceStatus.COMMITTED, SequenceStatus.DECODING, SequenceStatus.ENDED}),
    SequenceStatus.COMMITTED: frozenset({SequenceStatus.DECODING, SequenceStatus.ENDED}),
    SequenceStatus.DECODING: frozenset({SequenceStatus.SWAPPING, SequenceStatus.ENDED}),
    SequenceStatus.SWAPPING: frozenset({SequenceStatus.SWAPPED, SequenceStatus.ENDED}),
    SequenceStatus.SWAPPED: frozenset({SequenceStatus.DECODING, SequenceStatus.ENDED}),
    SequenceStatus.ENDED: frozenset(),
}
"""PAUSED -> PREFILLED or DECODING: the last chunk was in flight when the pause came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """All that a node must know to compute a sequence. Nothing in it changes afterwards but what `tries` remembers."""

    token_ids: "array[int]"
    """Prompt and the output ids known so far, typecode 'I'; copied by the scheduler."""
    num_prompt_tokens: int
    """How many of token_ids are the original prompt, over all attempts."""
    sampling: SamplingParams
    priority: int
    """1 (first) to 5."""
    accepted_at: float
    """Local time at which the router accepted the request (now - waited), in seconds; may lie before this process."""
    mode: Mode = "decode"
    times_preempted: int = 0
    """How often decode gave this request back before. At max_preemptions its blocks are reserved to the end."""
    tries: AllocationMemo = field(default_factory=AllocationMemo, init=False, compare=False, repr=False)
    """To get blocks for token_ids: who waits is tried again with every event, and its ids may be many."""

    @classmethod
    def of(cls, request: RequestSpec, *, accepted_at: float, mode: Mode) -> "SequenceSpec":
        """The sequence of a request that this node computes."""
        return cls(
            token_ids=request.prompt_token_ids + request.output_token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=request.sampling,
            priority=request.priority,
            accepted_at=accepted_at,
            mode=mode,
            times_preempted=request.times_preempted,
        )

    @property
    def num_known(self) -> int:
        """Number of ids known."""
        return len(self.token_ids)

    @property
    def is_retry(self) -> bool:
        """Whether the last known id is an output token, so that one may go on from it without drawing."""
        return len(self.token_ids) > self.num_prompt_tokens

    @property
    def tokens_to_start(self) -> int:
        """KV positions that must have blocks before anything starts: all known ids, and the next token's if it
        is ever computed."""
        return min(len(self.token_ids) + 1, self.max_kv_tokens)

    @property
    def max_kv_tokens(self) -> int:
        """KV positions needed to the very end: the last output token needs none."""
        return self.num_prompt_tokens + self.sampling.max_new_tokens - 1


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence under way. 0 <= num_computed_tokens <= num_scheduled_tokens <= len(token_ids), or one id more while
    a step is planned ahead."""

    seq_id: int
    spec: SequenceSpec
    status: SequenceStatus
    token_ids: "array[int]"
    """Prompt and output, typecode 'I'; its own copy, grows with every token drawn."""
    virtual_finish_time: float = 0.0
    """What its turn among waiting and computing ones goes by, within its class: see `pace`."""
    num_computed_tokens: int = 0
    """Positions below it have KV."""
    num_scheduled_tokens: int = 0
    """Positions below it have KV or get it from a step in flight; with the first of two ids that are being drawn."""
    steps_in_flight: int = 0
    """Steps that compute it, and steps that copy its blocks; one that does both counts twice."""
    num_undrawn: int = 0
    """Steps in flight that draw a token for it: two when the later one was planned ahead."""
    swapped_at: float = 0.0
    """When it was last swapped out, in seconds of the scheduler's clock."""
    pins: int = 0
    """How many others touch the blocks."""
    announced: bool = False
    """Whether the model runner was told about it."""
    trusted: bool = True
    """False: a step of it failed, and what it computes is not published any more."""
    history: list[SequenceStatus] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        """Output ids of all attempts."""
        return len(self.token_ids) - self.spec.num_prompt_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Known ids that no step has computed or computes; -1 when the id that is being drawn is scheduled too."""
        return len(self.token_ids) - self.num_scheduled_tokens

    @property
    def may_go_ahead(self) -> bool:
        """Whether the token that a step in flight draws may be computed by the next one: it may be the last only by
        what it is, not by the number of tokens."""
        return self.num_undrawn == 1 and self.num_outputs + 1 < self.spec.sampling.max_new_tokens

    def move(self, to: SequenceStatus) -> None:
        """Change the status; InvariantError with the story when the table has no such row."""
        if to not in TRANSITIONS[self.status]:
            story = " -> ".join(status.value for status in (*self.history, self.status))
            raise InvariantError(f"sequence {self.seq_id} may not go to {to.value}; it went {story}")
        self.history.append(self.status)
        self.status = to

    def set_computed(self, num_tokens: int) -> None:
        """Positions below num_tokens have KV, and no step is in flight."""
        self.num_computed_tokens = self.num_scheduled_tokens = num_tokens

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Whether the last id, an output token, ends it."""
        sampling, last = self.spec.sampling, self.token_ids[-1]
        if not sampling.ignore_eos and (last in eos_token_ids or last in sampling.stop_token_ids):
            return "stop"
        return "length" if self.num_outputs >= sampling.max_new_tokens else None
