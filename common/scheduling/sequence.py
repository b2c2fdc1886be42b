"""The scheduler's settings (`SchedulerConfig`), and one sequence: its spec, its state, its transition table.

Plain data: decides nothing about other sequences and owns no blocks.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from kvferry.common.base.errors import ConfigError, InvariantError
from kvferry.common.kv.block_pool import AllocationMemo
from kvferry.common.protocol.messages import FinishReason
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one node's scheduler, named as in the cluster file. Shares are fractions of the pool's blocks."""

    eos_token_ids: frozenset[int] = frozenset()
    """The model's end-of-sequence ids."""
    vocab_size: int = 2**32
    """Valid ids are below it; a sequence with another id is refused."""
    max_step_tokens: int = 512
    """Token budget of one step: decode tokens first, the rest for prompt chunks."""
    max_chunk_tokens: int = 0
    """Maximum tokens of one prompt in a step while other prompts want some too; 0: no limit."""
    max_running: int = 256
    """Maximum number of sequences that are computing, decoding, swapped out or reserved."""
    max_steps_in_flight: int = 1
    """2 or more: schedule the next step of decoding sequences while their tokens are still in flight."""
    aging_s: float = 10.0
    """Waiting this long raises a sequence by one priority class."""
    max_preemptions: int = 3
    """A request that was preempted this often is not preempted again."""
    swap_wait_s: float = 2.0
    """A swapped-out sequence that gets no blocks for this long is preempted."""
    reserved_share: float = 0.5
    """Uncommitted reservations together hold at most this share; a single one may exceed it."""
    watermark_blocks_share: float = 0.02
    """Kept free while sequences decode, so that they can grow; rounded up to whole blocks."""

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
"""prefill: compute all known ids, sample one token, stop and keep the blocks. decode: generate to the end."""


class SequenceStatus(Enum):
    """Status of a sequence. All but WAITING and SWAPPED hold blocks; ENDED only until the last step or pin releases
    them."""

    WAITING = "waiting"
    """In the queue, without blocks."""
    COMPUTING = "computing"
    """Has blocks for all known ids; computes them in chunks."""
    PREFILLED = "prefilled"
    """Computed, with a token to continue from; holds its blocks until `release`."""
    RESERVED = "reserved"
    """Decode role: holds blocks for KV that another node sends."""
    COMMITTED = "committed"
    """Decode role: this node owns the request; KV may still be arriving."""
    DECODING = "decoding"
    """Computes one token per step."""
    SWAPPING = "swapping"
    """A step in flight copies its KV to the host; it still holds its device blocks."""
    SWAPPED = "swapped"
    """Its KV is in host blocks only; it waits for device blocks."""
    ENDED = "ended"
    """Finished, failed, aborted, released or preempted; waits for a step in flight or an unpin."""


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.COMPUTING, SequenceStatus.PREFILLED, SequenceStatus.ENDED}),
    SequenceStatus.COMPUTING: frozenset({SequenceStatus.PREFILLED, SequenceStatus.DECODING, SequenceStatus.ENDED}),
    SequenceStatus.PREFILLED: frozenset({SequenceStatus.ENDED}),
    SequenceStatus.RESERVED: frozenset({SequenceStatus.COMMITTED, SequenceStatus.DECODING, SequenceStatus.ENDED}),
    SequenceStatus.COMMITTED: frozenset({SequenceStatus.DECODING, SequenceStatus.ENDED}),
    SequenceStatus.DECODING: frozenset({SequenceStatus.SWAPPING, SequenceStatus.ENDED}),
    SequenceStatus.SWAPPING: frozenset({SequenceStatus.SWAPPED, SequenceStatus.ENDED}),
    SequenceStatus.SWAPPED: frozenset({SequenceStatus.DECODING, SequenceStatus.ENDED}),
    SequenceStatus.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """Everything a node needs to compute a sequence. Immutable but for `memo`."""

    token_ids: "array[int]"
    """Prompt and the output ids known so far, typecode 'I'; copied by the scheduler."""
    num_prompt_tokens: int
    """Number of token_ids that are the original prompt, over all attempts."""
    sampling: SamplingParams
    priority: int
    """1 (first) to 5."""
    accepted_at: float
    """Local time at which the router accepted the request (now - waited), in seconds; may lie before this process."""
    mode: Mode = "decode"
    times_preempted: int = 0
    """Number of earlier preemptions. From max_preemptions on, blocks for the full length are allocated at the start."""
    memo: AllocationMemo = field(default_factory=AllocationMemo, init=False, compare=False, repr=False)
    """Makes repeated allocation attempts cheap: a waiting sequence, maybe a long one, is tried at every event."""

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
        return len(self.token_ids)

    @property
    def is_retry(self) -> bool:
        """Whether the last known id is an output token, from which decoding can continue without sampling."""
        return len(self.token_ids) > self.num_prompt_tokens

    @property
    def tokens_to_start(self) -> int:
        """Positions that must have blocks before the sequence starts: all known ids, and the next token if it is
        ever computed."""
        return min(len(self.token_ids) + 1, self.max_kv_tokens)

    @property
    def max_kv_tokens(self) -> int:
        """Positions that need KV over the full length: the last output token needs none."""
        return self.num_prompt_tokens + self.sampling.max_new_tokens - 1


@dataclass(slots=True, eq=False)
class Sequence:
    """A live sequence. 0 <= num_computed_tokens <= num_scheduled_tokens <= len(token_ids), or len(token_ids) + 1 while
    a step is scheduled ahead."""

    seq_id: int
    spec: SequenceSpec
    status: SequenceStatus
    token_ids: "array[int]"
    """Prompt and output, typecode 'I'; a private copy, which grows with every sampled token."""
    virtual_finish_time: float = 0.0
    """Orders waiting and computing sequences within a class: see `PrefillRate`."""
    num_computed_tokens: int = 0
    """Positions below it have KV."""
    num_scheduled_tokens: int = 0
    """Positions below it have KV or get it from a step in flight; includes the first of two tokens in flight."""
    steps_in_flight: int = 0
    """Steps that compute it plus steps that copy its blocks; one that does both counts twice."""
    tokens_in_flight: int = 0
    """Steps in flight that sample a token for it: two when the second was scheduled ahead."""
    swapped_at: float = 0.0
    """When it was last swapped out, in seconds of the scheduler's clock."""
    pins: int = 0
    """Number of transports using the blocks."""
    announced: bool = False
    """Whether the model runner has received its NewSequence."""
    is_valid: bool = True
    """False once a step of it failed: what it computes is no longer published."""
    history: list[SequenceStatus] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        """Number of output ids, over all attempts."""
        return len(self.token_ids) - self.spec.num_prompt_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Number of known ids in no step yet; -1 when the token in flight is scheduled too."""
        return len(self.token_ids) - self.num_scheduled_tokens

    @property
    def may_schedule_ahead(self) -> bool:
        """Whether the next step may compute the token in flight: max_new_tokens leaves room for one more after it.
        It may still turn out to be an eos or stop id."""
        return self.tokens_in_flight == 1 and self.num_outputs + 1 < self.spec.sampling.max_new_tokens

    def move(self, to: SequenceStatus) -> None:
        """Change the status. Raises InvariantError, with the history, when TRANSITIONS does not allow it."""
        if to not in TRANSITIONS[self.status]:
            history = " -> ".join(status.value for status in (*self.history, self.status))
            raise InvariantError(f"sequence {self.seq_id} may not become {to.value}; it was {history}")
        self.history.append(self.status)
        self.status = to

    def set_computed(self, num_tokens: int) -> None:
        """Record that positions below num_tokens have KV. No step of it may be in flight."""
        self.num_computed_tokens = self.num_scheduled_tokens = num_tokens

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the last id, an output token, ends the sequence; None when it does not."""
        sampling, last = self.spec.sampling, self.token_ids[-1]
        if not sampling.ignore_eos and (last in eos_token_ids or last in sampling.stop_token_ids):
            return "stop"
        return "length" if self.num_outputs >= sampling.max_new_tokens else None
