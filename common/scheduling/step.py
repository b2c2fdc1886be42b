"""The hand-over between the scheduler (pure) and the model runner: one step's work and its result. Plain data.

The scheduler says what changed (`new`, `finished`), not the whole state; the runner keeps per-sequence sampler state.
"""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.common.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # arrays cannot be subscripted when the code runs, and who decodes a plan asks for the type then


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence the runner has not met: what its sampler needs to know."""

    seq_id: int
    """Node-local handle, never used twice in a process life."""
    token_ids: TokenIds
    """All ids known so far, prompt and output (typecode 'I'): the repetition penalty looks at them."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: a prefill chunk or a single decode token, treated alike."""

    seq_id: int
    token_ids: TokenIds
    """The ids to compute in this step (typecode 'I'), at positions start_position, start_position + 1, ... A single 0
    with `after_draw`."""
    start_position: int
    """Equals num_computed_tokens; positions below it are in the cache already."""
    block_table: tuple[int, ...]
    """Blocks that cover positions 0 .. start_position + len(token_ids) - 1, in order."""
    sample: bool
    """Whether the last position's logits are wanted and a token is drawn for the position after it."""
    seed_position: int = -1
    """Absolute position of the token to be drawn (start_position + len(token_ids)); -1 when sample is False."""
    after_draw: bool = False
    """Planned ahead: the one id to compute is what the step before draws for this sequence (`drawn.py` puts it in)."""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """KV of one sequence that moves between device and host: whole blocks, in order, first to first."""

    seq_id: int
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the runner does in one call of the model.

    The copies come first, in any order among themselves: no block, of the device or the host, is in two of them.
    """

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    new: tuple[NewSequence, ...] = ()
    finished: tuple[int, ...] = ()
    """Sequences whose sampler state may be dropped, before anything else is done."""
    report_layers: bool = False
    """Whether the runner shall report progress while layers complete (something is being ferried)."""
    swap_out: tuple[BlockCopies, ...] = ()
    """Device to host. The device blocks are nobody else's until the plan has come back."""
    swap_in: tuple[BlockCopies, ...] = ()
    """Host to device, for sequences that may be computed in this very step."""

    @property
    def has_copies(self) -> bool:
        """Whether anything goes to the host or comes from there."""
        return bool(self.swap_out or self.swap_in)

    @property
    def touched(self) -> tuple[int, ...]:
        """seq_id of everything that it computes or copies; twice for a sequence of which it does both."""
        return tuple(part.seq_id for parts in (self.scheduled, self.swap_out, self.swap_in) for part in parts)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of a step."""

    step_id: int
    sampled: dict[int, int] = field(default_factory=dict)
    """seq_id -> token id, for every scheduled sequence with `sample`."""
    failed: dict[int, str] = field(default_factory=dict)
    """seq_id -> why no token could be drawn (not-a-number logits): 424 for that request alone."""
    duration_s: float = 0.0
