"""Continuous batching for both legs: pure and deterministic. No IO, no clock (`now` is handed in), no tensors.

The life of a sequence here:
 1. `add` puts it into the waiting queue (or `reserve` takes its blocks at once: the decode leg, steps 5 to 7).
 2. `schedule` starts it when blocks for all its tokens are there (`Started`) and gives it chunks.
 3. `apply` takes a step's result in: `ChunkComputed`, then `Sampled`.
 4. Mode `prefill`: it stops as PREFILLED (`Prefilled`) until `release` or `continue_decoding`.
 5. `reserve`: blocks for KV that another node sends; leading ones may come from the prefix cache.
 6. `commit`: owned for good; `activate`: all KV is there, it goes on from the handed token.
 7. It decodes, one token a step (`Sampled`), until `Finished`, `Failed`, `GivenBack`, or `abort`.

Blocks of an ended sequence are freed when no step in flight names it and nobody has it pinned: the engine may still
write them, a transport may still read them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from common.kv.block_pool import BlockPool
from common.protocol.messages import Load
from common.scheduling.events import SchedulerEvent
from common.scheduling.scheduler_config import SchedulerConfig
from common.scheduling.sequence import SequenceSpec, Status
from common.scheduling.step import StepPlan, StepResult


class Scheduled(NamedTuple):
    """What `schedule` answers."""

    plan: StepPlan | None
    """None: nothing to run now."""
    events: list[SchedulerEvent]
    """Started, Prefilled (nothing was left to compute), GivenBack."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks kept for a sequence whose KV comes from elsewhere."""

    seq_id: int
    first_token: int
    """Position from which KV is lacked: a multiple of the block size, or the number of known ids' whole blocks."""
    block_table: tuple[int, ...]


class Scheduler:
    """Owns the sequences of a node and decides what runs next. See the module's docstring for a sequence's life.

    Unless said otherwise a method raises InvariantError for a sequence it does not know (any more) or that is in a
    status where the call makes no sense; nothing is changed then.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None: ...

    # --- in ---

    def add(self, spec: SequenceSpec, now: float) -> int:
        """Queue a sequence; returns its seq_id. RequestInvalidError: it could never run here, or breaks a rule."""
        ...

    def take_over(self, old_seq_id: int, spec: SequenceSpec, now: float) -> int:
        """Like `add`, with the blocks of an earlier attempt, which ends by it. Starts past the queue if these suffice
        with what is free (its `Started` comes with the next `schedule`), else it queues and finds them as prefix cache.
        """
        ...

    def reserve(self, spec: SequenceSpec, now: float) -> Reservation | None:
        """Keep blocks for KV from another node, all or nothing. None: full (blocks, watermark, share, max_running).
        RequestInvalidError: it could never run here."""
        ...

    def commit(self, seq_id: int) -> None:
        """RESERVED -> COMMITTED: no longer counted among the uncommitted reservations."""
        ...

    def activate(self, seq_id: int, next_token: int, num_tokens: int, now: float) -> list[SchedulerEvent]:
        """RESERVED or COMMITTED -> DECODING: positions 0 .. num_tokens - 1 have KV, next_token is at num_tokens.

        num_tokens is the number of known ids, or one less (then next_token must be the last known id, an output
        token); ProtocolError otherwise, and nothing is changed. Answers Sampled for next_token (the stream starts with
        it), and Finished when that token ends it.
        """
        ...

    def continue_decoding(self, seq_id: int) -> None:
        """PREFILLED -> DECODING: it is finished where it is."""
        ...

    def release(self, seq_id: int) -> None:
        """End a PREFILLED, RESERVED or COMMITTED sequence; what is computed stays as prefix cache."""
        ...

    def abort(self, seq_id: int) -> None:
        """End a sequence in whatever status; a token still being drawn for it is dropped. No event follows."""
        ...

    def pause(self, seq_id: int) -> None:
        """COMPUTING -> PAUSED: no further chunk until `resume`; blocks are kept."""
        ...

    def resume(self, seq_id: int) -> None:
        """PAUSED -> COMPUTING."""
        ...

    def pin(self, seq_id: int) -> None:
        """Somebody besides the engine (a transport) touches the blocks: they are not freed before `unpin`. Counted."""
        ...

    def unpin(self, seq_id: int) -> None:
        """Take one `pin` back; works on an ended sequence too, whose blocks are then freed."""
        ...

    # --- steps ---

    def schedule(self, now: float, may_start: Callable[[SequenceSpec], bool] | None = None) -> Scheduled:
        """Plan the next step. `may_start` is asked for the head of the queue before it starts; False keeps it there,
        and all behind it."""
        ...

    def apply(self, result: StepResult, now: float) -> list[SchedulerEvent]:
        """Take in the result of the oldest step in flight. InvariantError: another step, or a token is missing."""
        ...

    # --- out ---

    def status(self, seq_id: int) -> Status | None:
        """None: not known (any more)."""
        ...

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """Its blocks, in order of position; empty while it waits."""
        ...

    def num_computed_tokens(self, seq_id: int) -> int:
        """Positions 0 .. n - 1 have KV."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        ...

    @property
    def work_waiting(self) -> bool:
        """Whether a step is in flight or some sequence could run: a healthy engine makes steps then."""
        ...

    @property
    def has_events(self) -> bool:
        """Whether `schedule` has events to tell even if it plans nothing."""
        ...

    def load(self) -> Load:
        """Numbers for Status."""
        ...

    def is_quiescent(self) -> bool:
        """No sequence, no step in flight, no block held."""
        ...

    def check_invariants(self) -> None:
        """Raise InvariantError when sequences, queue, steps and blocks do not agree."""
        ...
