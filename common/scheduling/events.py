"""What the scheduler tells its caller, as plain data. No decisions.

Order within one answer is the order in which it happened; for one sequence it is always
Started, ChunkComputed..., Sampled, then one of Prefilled, Finished, Failed, or further Sampled ones.
After Finished, Failed or Preempted the scheduler has forgotten the sequence: its id is not to be used again.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Started:
    """A waiting sequence got blocks for all its tokens; positions below num_cached_tokens have their KV already.

    The moment to ask a decode node for its reservation.
    """

    seq_id: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """Positions token_start .. token_end - 1 of a prompt have their KV in the cache (all layers).

    Not told of the chunk with which the sequence ends: its blocks may be gone when the caller reads this.
    """

    seq_id: int
    token_start: int
    token_end: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was drawn; it is appended to the sequence."""

    seq_id: int
    token_id: int
    position: int
    """Absolute position: prompt ids and earlier outputs lie below it."""
    index: int
    """Output index: position - num_prompt_tokens."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A sequence of mode `prefill` is computed and holds its blocks until told what next.

    Positions 0 .. num_tokens - 1 have KV; token_id is the token at position num_tokens to go on from. It was just
    drawn, or, if everything but the last known id was cached or held, is that last known id.
    """

    seq_id: int
    num_tokens: int
    token_id: int
    index: int
    """Output index of token_id."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Generation ended by itself: `stop` for an eos or stop id, `length` for max_new_tokens."""

    seq_id: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """No token could be drawn, or the step of this sequence failed; its blocks are not kept as prefix cache."""

    seq_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """Preempted: decode ran out of blocks and this sequence gave its own. A re-plan is due, nothing else is lost."""

    seq_id: int


SchedulerEvent = Started | ChunkComputed | Sampled | Prefilled | Finished | Failed | Preempted
