"""Events that the scheduler returns. Plain data.

Events are in order of occurrence. For one sequence that is always
Started, ChunkComputed..., Sampled, then Prefilled, Finished, Failed, Preempted, or further Sampled events.
After Finished, Failed or Preempted the scheduler has forgotten the sequence: its id is invalid.
"""

from dataclasses import dataclass

from kvferry.common.protocol.messages import FinishReason


@dataclass(frozen=True, slots=True)
class Started:
    """A waiting sequence has blocks for all its tokens; positions below num_cached_tokens have KV.

    The prefill role sends Reserve to a decode node at this event.
    """

    seq_id: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """Positions token_start .. token_end - 1 of a prompt have KV in all layers.

    Omitted for the chunk with which the sequence ends: its blocks may be free by the time the caller reads this.
    """

    seq_id: int
    token_start: int
    token_end: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was sampled and appended to the sequence."""

    seq_id: int
    token_id: int
    position: int
    """Absolute position: prompt ids and earlier outputs lie below it."""
    index: int
    """Output index: position - num_prompt_tokens."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A sequence of mode `prefill` is computed; it holds its blocks until `release`.

    Positions 0 .. num_tokens - 1 have KV; token_id, at position num_tokens, is the token to continue from. It was just
    sampled, or is the last known id when everything before it was cached or inherited.
    """

    seq_id: int
    num_tokens: int
    token_id: int
    index: int
    """Output index of token_id."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Generation is complete: `stop` for an eos or stop id, `length` for max_new_tokens."""

    seq_id: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """No token could be sampled, or the step failed for this sequence; its blocks leave the prefix cache."""

    seq_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """Decoding ran out of blocks and this sequence lost its own. The router migrates the request; no token is lost."""

    seq_id: int


SchedulerEvent = Started | ChunkComputed | Sampled | Prefilled | Finished | Failed | Preempted
