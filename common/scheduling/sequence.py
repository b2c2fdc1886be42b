"""One sequence on one node: what it is (`SequenceSpec`), how far it is (`Sequence`), what may follow what.

Plain state with a transition table; it decides nothing about other sequences and owns no blocks.
"""

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from common.errors import InvariantError
from common.sampling_params import SamplingParams

Mode = Literal["prefill", "decode"]
"""prefill: compute all known ids, draw one token, stop and hold the blocks. decode: go on to the end."""

LOWEST_PRIORITY = 5


class Status(Enum):
    """Where a sequence stands. All but WAITING hold blocks; ENDED ones only until nobody touches these any more."""

    WAITING = "waiting"
    """In the queue, without blocks."""
    COMPUTING = "computing"
    """Has blocks for all known ids; these are being computed in chunks."""
    PAUSED = "paused"
    """Like COMPUTING, but gets no chunk until it is resumed."""
    PREFILLED = "prefilled"
    """Computed, with a token to go on from; holds its blocks until told what next."""
    RESERVED = "reserved"
    """Decode leg: blocks are kept for KV that another node sends."""
    COMMITTED = "committed"
    """Decode leg: owned for good; KV may still be on its way."""
    DECODING = "decoding"
    """Gets one token a step."""
    ENDED = "ended"
    """Finished, failed, aborted, released or given back; waits for the step in flight or for an unpin."""


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.COMPUTING, Status.PREFILLED, Status.ENDED}),
    Status.COMPUTING: frozenset({Status.PAUSED, Status.PREFILLED, Status.DECODING, Status.ENDED}),
    Status.PAUSED: frozenset({Status.COMPUTING, Status.PREFILLED, Status.DECODING, Status.ENDED}),
    Status.PREFILLED: frozenset({Status.DECODING, Status.ENDED}),
    Status.RESERVED: frozenset({Status.COMMITTED, Status.DECODING, Status.ENDED}),
    Status.COMMITTED: frozenset({Status.DECODING, Status.ENDED}),
    Status.DECODING: frozenset({Status.ENDED}),
    Status.ENDED: frozenset(),
}
"""PAUSED -> PREFILLED or DECODING: the last chunk was in flight when the pause came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """All that a node must know to compute a sequence. Nothing in it changes afterwards."""

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
    """How often decode gave this request back before. At max_preempt its blocks are reserved to the end."""

    @property
    def num_known(self) -> int:
        """Number of ids known."""
        return len(self.token_ids)

    @property
    def is_replan(self) -> bool:
        """Whether the last known id is an output token, so that one may go on from it without drawing."""
        return len(self.token_ids) > self.num_prompt_tokens

    @property
    def max_kv_tokens(self) -> int:
        """KV positions needed to the very end: the last output token needs none."""
        return self.num_prompt_tokens + self.sampling.max_new_tokens - 1
