"""Continuous batching for both roles. Pure and deterministic: no IO, no clock (the caller passes `now`), no tensors.

The life of a sequence:
 1. `add` queues it. (Decode role: `reserve` allocates its blocks immediately; see 5.)
 2. `schedule` starts it when there are blocks for all its tokens (`Started`), and adds its chunks to steps.
 3. `apply` processes a step's result: `ChunkComputed`, then `Sampled`.
 4. Mode `prefill`: it stops as PREFILLED (`Prefilled`) until `release`. Mode `decode`: it continues with 7.
 5. `reserve` allocates blocks for KV that another node sends; leading ones may come from the prefix cache.
 6. `commit`: this node owns the request. `activate`: all KV has arrived, decoding starts from the transferred token.
 7. It decodes one token per step (`Sampled`) until `Finished`, `Failed`, `Preempted`, or `abort`. The next step may be
    scheduled before its token is known. When blocks run out it may be swapped to the host and back, without an event.

Blocks of an ended sequence are freed when no step in flight names it and it is not pinned: the engine may still write
them, and a transport may still read them. The parts: `sequence_table` (sequences by status), `admission` (who may
allocate blocks), `waiting_queue`, `step_planner` and `step_builder` (what runs), `preemption_policy` (who gets the
last blocks), `swapping` (to the host and back), `results` (what a step's result changes).
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.common.base.errors import InvariantError, ProtocolError
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.kv.host_pool import HostPool
from kvferry.common.protocol.messages import NodeLoad
from kvferry.common.scheduling.admission import SWAPPED_OUT, Admission
from kvferry.common.scheduling.events import SchedulerEvent
from kvferry.common.scheduling.preemption_policy import PreemptionPolicy
from kvferry.common.scheduling.results import Results, check_result
from kvferry.common.scheduling.sequence import SchedulerConfig, Sequence, SequenceSpec, SequenceStatus
from kvferry.common.scheduling.sequence_table import SequenceTable
from kvferry.common.scheduling.step import StepBatch, StepResult
from kvferry.common.scheduling.step_builder import StepBuilder
from kvferry.common.scheduling.step_planner import MayStart, StepPlanner
from kvferry.common.scheduling.swapping import Swapping
from kvferry.common.scheduling.waiting_queue import PrefillRate, WaitingQueue


class Scheduled(NamedTuple):
    """Result of `schedule`."""

    batch: StepBatch | None
    """None: nothing to run now."""
    events: list[SchedulerEvent]
    """Started, Prefilled (nothing was left to compute), Preempted."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks allocated for a sequence whose KV another node sends."""

    seq_id: int
    first_token: int
    """First position without KV, a multiple of the block size. Equals the number of known ids when everything is
    cached and no KV has to be sent."""
    block_table: tuple[int, ...]


class Scheduler:
    """Owns the sequences of a node and decides what runs next. The module docstring has the life of a sequence.

    Unless noted otherwise, a method raises InvariantError, and changes nothing, for an unknown or forgotten sequence
    and for a status in which the call is not allowed.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, host: HostPool | None = None) -> None:
        """`host`: where to swap sequences out to when `pool` is full. None: no swapping."""
        self._config = config
        self._pool = pool
        self._host = host or HostPool(0)
        self._table = SequenceTable(pool, self._host)
        self._queue = WaitingQueue(config.aging_s)
        self._admission = Admission(config, pool, self._table)
        self._swapping = Swapping(pool, self._host, self._table)
        self._preemption = PreemptionPolicy(config, pool, self._table, self._swapping)
        self._planner = StepPlanner(config, self._table, self._queue, self._admission, self._preemption)
        self._results = Results(config, pool, self._table, self._swapping)
        self._prefill_rate = PrefillRate()
        self._in_flight: deque[StepBatch] = deque()
        self._num_steps = 0
        self._events: list[SchedulerEvent] = []
        """Returned by the next `schedule`."""

    # --- new sequences ---

    def add(self, spec: SequenceSpec, now: float) -> int:
        """Queue a sequence and return its seq_id. Raises RequestInvalidError: see `Admission.check`."""
        self._admission.check(spec)
        return self._enqueue(self._create_waiting(spec))

    def inherit_blocks(self, old_seq_id: int, spec: SequenceSpec, now: float) -> int:
        """Like `add`, but reuse the blocks of an earlier attempt, which ends.

        Bypasses the queue if those blocks and the free ones suffice (the next `schedule` returns its `Started`).
        Otherwise it is queued, and may find them in the prefix cache.
        """
        self._admission.check(spec)
        old = self._table.get(old_seq_id)
        if old.status is SequenceStatus.ENDED:
            raise InvariantError(f"sequence {old_seq_id} has ended: its blocks cannot be inherited")
        seq = self._create_waiting(spec)
        num_cached = self._admission.inherit(old, seq)
        self.abort(old_seq_id)
        if num_cached is None:
            num_cached = self._admission.acquire(seq)
        if num_cached is None:
            return self._enqueue(seq)
        self._planner.start(seq, num_cached, self._events)
        return seq.seq_id

    def check(self, spec: SequenceSpec) -> None:
        """Raise RequestInvalidError if the spec is invalid or its full length could never run here. Reads every id."""
        self._admission.check(spec, full_length=True)

    def reserve(self, spec: SequenceSpec, now: float) -> Reservation | None:
        """Allocate blocks for KV from another node, all or nothing.

        None: refused by free blocks, the watermark, reserved_share, max_running, or swapped-out sequences. The spec
        must have passed `check` once; it may be tried any number of times.
        """
        table = self._admission.reserve(spec, self._table.next_id)
        if table is None:
            return None
        seq = self._table.create(spec, SequenceStatus.RESERVED)
        seq.set_computed(table.num_cached_tokens)
        return Reservation(seq.seq_id, table.num_cached_tokens, table.block_ids)

    def commit(self, seq_id: int) -> None:
        """RESERVED -> COMMITTED: no longer counts as an uncommitted reservation."""
        self._table.move(self._table.get(seq_id, SequenceStatus.RESERVED), SequenceStatus.COMMITTED)

    def activate(self, seq_id: int, next_token: int, num_tokens: int, now: float) -> list[SchedulerEvent]:
        """RESERVED or COMMITTED -> DECODING: positions 0 .. num_tokens - 1 have KV, next_token is at num_tokens.

        num_tokens must be the number of known ids, or one less if next_token is the last known id and an output
        token. next_token must be in the vocabulary. Raises ProtocolError otherwise and changes nothing. Returns
        Sampled for next_token (the stream starts with it), and Finished when that token ends the sequence.
        """
        seq = self._table.get(seq_id, SequenceStatus.RESERVED, SequenceStatus.COMMITTED)
        known = seq.spec.num_known
        if next_token >= self._config.vocab_size:
            raise ProtocolError(f"id {next_token} is outside the vocabulary [0, {self._config.vocab_size})")
        resumes_at_last_id = seq.spec.is_retry and num_tokens == known - 1 and next_token == seq.token_ids[-1]
        if num_tokens != known and not resumes_at_last_id:
            raise ProtocolError(f"hand-over of {num_tokens} tokens and id {next_token}, but {known} ids are known")
        self._table.move(seq, SequenceStatus.DECODING)
        seq.set_computed(num_tokens)
        self._pool.publish(seq_id, seq.token_ids, num_tokens)
        if num_tokens == known:
            seq.token_ids.append(next_token)
        events: list[SchedulerEvent] = []
        self._results.accept_token(seq, events)
        return events

    # --- ending and pinning sequences ---

    def release(self, seq_id: int) -> None:
        """End a PREFILLED, RESERVED or COMMITTED sequence; computed blocks stay in the prefix cache."""
        self._table.get(seq_id, SequenceStatus.PREFILLED, SequenceStatus.RESERVED, SequenceStatus.COMMITTED)
        self.abort(seq_id)

    def abort(self, seq_id: int) -> None:
        """End a sequence in any status and drop its tokens in flight. No event follows."""
        seq = self._table.get(seq_id)
        if seq.status is SequenceStatus.WAITING and seq_id in self._queue:
            self._queue.remove(seq_id)
        self._table.end(seq)
        self._events = [event for event in self._events if event.seq_id != seq_id]

    def pin(self, seq_id: int) -> None:
        """Keep the blocks until `unpin`: a transport reads or writes them. Pins are counted."""
        self._table.pin(seq_id)

    def unpin(self, seq_id: int) -> None:
        """Remove one pin. The last one frees the blocks of an ended sequence."""
        self._table.unpin(seq_id)

    # --- steps ---

    def schedule(self, now: float, may_start: MayStart | None = None) -> Scheduled:
        """Build the next step: decoding sequences first, then prompts. It may consist of copies alone.

        While another step is in flight, the new one also computes the tokens which that step samples; if a block for
        one of them is missing, no step is built. `may_start` is called for the head of the queue before it starts;
        False keeps it, and everything behind it, in the queue.
        """
        events, self._events = self._events, []
        if not len(self._table) or len(self._in_flight) >= self._config.max_steps_in_flight:
            return Scheduled(None, events)
        if self._in_flight and not self._preemption.allocate_ahead():
            return Scheduled(None, events)
        builder = StepBuilder(self._config.max_step_tokens)
        self._planner.fill(builder, now, may_start or _always, events)
        return Scheduled(self._build(builder), events)

    def apply(self, result: StepResult, now: float) -> list[SchedulerEvent]:
        """Process the result of the oldest step in flight. Raises InvariantError: another step, or a missing token."""
        if not self._in_flight or self._in_flight[0].step_id != result.step_id:
            raise InvariantError(f"result of step {result.step_id}, which is not the oldest in flight")
        check_result(self._in_flight[0], result)
        batch = self._in_flight.popleft()
        self._prefill_rate.observe(batch, result.duration_s)
        return self._results.apply(batch, result)

    # --- queries ---

    def status(self, seq_id: int) -> SequenceStatus | None:
        """None: unknown or forgotten."""
        seq = self._table.find(seq_id)
        return None if seq is None else seq.status

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """Its blocks in order of position; empty while it is waiting or swapped out."""
        self._table.get(seq_id)
        return self._pool.table(seq_id) if self._pool.holds(seq_id) else ()

    def num_computed_tokens(self, seq_id: int) -> int:
        """n such that positions 0 .. n - 1 have KV, on the device or the host. For a reservation: the cached prefix."""
        return self._table.get(seq_id).num_computed_tokens

    def is_in_step(self, seq_id: int) -> bool:
        """Whether a step in flight computes or copies it."""
        return self._table.get(seq_id).steps_in_flight > 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def work_waiting(self) -> bool:
        """Whether a step is in flight or a sequence can run: a healthy engine then makes progress.

        Sequences that are swapped out, or lack a block while none is free, wait for blocks, not for the engine.
        """
        if self._in_flight or self._table.members(SequenceStatus.COMPUTING):
            return True
        return any(self._preemption.can_run(seq) for seq in self._table.members(SequenceStatus.DECODING).values())

    @property
    def is_starved(self) -> bool:
        """Whether sequences are decoding or swapped out, but none can run: reservations or waiting sequences hold the
        blocks."""
        return not self.work_waiting and self._table.count(SequenceStatus.DECODING, SequenceStatus.SWAPPED) > 0

    def load(self) -> NodeLoad:
        computing = self._table.members(SequenceStatus.COMPUTING).values()
        running = (
            SequenceStatus.COMPUTING,
            SequenceStatus.PREFILLED,
            SequenceStatus.COMMITTED,
            SequenceStatus.DECODING,
            *SWAPPED_OUT,
        )
        return NodeLoad(
            waiting_requests=len(self._queue),
            waiting_tokens=self._queue.total_tokens
            + sum(len(seq.token_ids) - seq.num_computed_tokens for seq in computing),
            running_requests=self._table.count(*running),
            total_blocks=self._pool.num_total,
            free_blocks=self._pool.num_free,
            reserved_blocks=self._admission.num_reserved_blocks,
            block_size=self._pool.block_size,
            prefix_hit_tokens=self._pool.prefix_hit_tokens,
            prompt_tokens=self._pool.prompt_tokens,
            preemptions=self._preemption.num_preemptions,
            swaps=self._swapping.num_swaps,
        )

    @property
    def live_ids(self) -> tuple[int, ...]:
        """Sequences that have not ended."""
        return self._table.live_ids

    def is_quiescent(self) -> bool:
        """Whether there is no sequence, no step in flight, and no block held on the device or the host."""
        return not (len(self._table) or self._in_flight or self._pool.num_held or self._host.num_held)

    # --- internal ---

    def _create_waiting(self, spec: SequenceSpec) -> Sequence:
        seq = self._table.create(spec, SequenceStatus.WAITING)
        seq.virtual_finish_time = self._prefill_rate.virtual_finish_time(spec.accepted_at, spec.num_known)
        return seq

    def _enqueue(self, seq: Sequence) -> int:
        self._queue.push(seq.seq_id, seq.spec.priority, seq.virtual_finish_time, seq.spec.num_known)
        return seq.seq_id

    def _build(self, builder: StepBuilder) -> StepBatch | None:
        if builder.is_empty:
            return None
        self._num_steps += 1
        batch = builder.build(self._num_steps, self._pool, self._table.take_finished())
        self._in_flight.append(batch)
        return batch

    def check_invariants(self) -> None:
        """Raise InvariantError when sequences, queue, steps and blocks disagree."""
        self._pool.check_invariants()
        self._queue.check_invariants()
        self._swapping.check_invariants(list(self._in_flight))
        self._table.check_invariants(Counter(seq_id for batch in self._in_flight for seq_id in batch.touched))
        waiting = self._table.members(SequenceStatus.WAITING)
        if len(waiting) != len(self._queue) or any(seq_id not in self._queue for seq_id in waiting):
            raise InvariantError("scheduler: the queue and the waiting sequences differ")
        if self._admission.num_running > self._config.max_running:
            raise InvariantError("scheduler: more sequences run than max_running allows")
        self._check_tokens_in_flight()
        for part in (part for batch in self._in_flight for part in batch.scheduled):
            if not self._pool.is_writable(part.seq_id, part.start_position, part.start_position + len(part.token_ids)):
                raise InvariantError(f"scheduler: sequence {part.seq_id} writes a block that is final or shared")

    def _check_tokens_in_flight(self) -> None:
        expected = Counter(part.seq_id for batch in self._in_flight for part in batch.scheduled if part.sample)
        if expected != Counter(self._table.tokens_in_flight):
            raise InvariantError("scheduler: counts of tokens in flight are wrong")
        # A sequence that ended while it was swapped out frees no blocks before that step is back.
        if len(self._in_flight) > 1 and self._table.count(SequenceStatus.SWAPPING):
            raise InvariantError("scheduler: a step that swaps sequences out is not the only one in flight")


def _always(_: SequenceSpec) -> bool:
    return True
