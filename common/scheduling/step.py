"""The interface between the scheduler and the model runner: one step's work and its result. Plain data.

A batch carries changes (`new`, `finished`), not the whole state; the runner keeps sampler state per sequence.
"""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.common.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # array cannot be subscripted at run time, and msgspec reads the annotations of a batch then


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that is new to the runner: what its sampler needs."""

    seq_id: int
    """Node-local handle, never reused within an incarnation."""
    token_ids: TokenIds
    """All ids known so far, prompt and output (typecode 'I'), for the repetition penalty."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: a prefill chunk or a single decode token, treated alike."""

    seq_id: int
    token_ids: TokenIds
    """The ids to compute in this step (typecode 'I'), at positions start_position, start_position + 1, ... A single 0
    if `is_placeholder`."""
    start_position: int
    """Equals num_computed_tokens: positions below it have KV."""
    block_table: tuple[int, ...]
    """Blocks that cover positions 0 .. start_position + len(token_ids) - 1, in order."""
    sample: bool
    """Whether to sample a token for the next position from the logits of the last one."""
    seed_position: int = -1
    """Absolute position of the token to sample (start_position + len(token_ids)); -1 when sample is False."""
    is_placeholder: bool = False
    """Scheduled ahead: the id to compute is the one that the previous step samples for this sequence; `TokensInFlight`
    fills it in."""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies one sequence's KV between device and host: whole blocks, pairwise in order."""

    seq_id: int
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The work of one forward pass.

    The runner performs the copies first, in any order: no block, of the device or the host, is in two of them.
    """

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    new: tuple[NewSequence, ...] = ()
    finished: tuple[int, ...] = ()
    """Sequences whose sampler state the runner drops, before anything else."""
    report_layers: bool = False
    """Whether the runner reports each completed layer, because KV of this step may be transferred."""
    swap_out: tuple[BlockCopies, ...] = ()
    """Device to host. The device blocks are not reused before the step's result is back."""
    swap_in: tuple[BlockCopies, ...] = ()
    """Host to device, for sequences that this same step may compute."""

    @property
    def has_copies(self) -> bool:
        return bool(self.swap_out or self.swap_in)

    @property
    def touched(self) -> tuple[int, ...]:
        """seq_id of every sequence that is computed or copied; twice for one that is both."""
        return tuple(part.seq_id for parts in (self.scheduled, self.swap_out, self.swap_in) for part in parts)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step."""

    step_id: int
    sampled: dict[int, int] = field(default_factory=dict)
    """seq_id -> token id, for every scheduled sequence with `sample`."""
    failed: dict[int, str] = field(default_factory=dict)
    """seq_id -> why no token could be sampled (not-a-number logits): 424 for that request alone."""
    duration_s: float = 0.0
