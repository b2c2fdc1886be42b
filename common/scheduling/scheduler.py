"""Continuous batching for both roles: pure and deterministic. No IO, no clock (`now` is handed in), no tensors.

The life of a sequence here:
 1. `add` puts it into the waiting queue (or `reserve` takes its blocks at once: the decode role, steps 5 to 7).
 2. `schedule` starts it when blocks for all its tokens are there (`Started`) and gives it chunks.
 3. `apply` takes a step's result in: `ChunkComputed`, then `Sampled`.
 4. Mode `prefill`: it stops as PREFILLED (`Prefilled`) until `release`. Mode `decode`: it goes on to 7.
 5. `reserve`: blocks for KV that another node sends; leading ones may come from the prefix cache.
 6. `commit`: owned for good; `activate`: all KV is there, it goes on from the handed token.
 7. It decodes, one token a step (`Sampled`), until `Finished`, `Failed`, `Preempted`, or `abort`. The next step may be
    planned before its token is known. When blocks run out it may be swapped to the host and back; nothing is told of
    that.

Blocks of an ended sequence are freed when no step in flight names it and nobody has it pinned: the engine may still
write them, a transport may still read them. The parts: `sequence_table` (who is where), `admission` (who may have
blocks), `planner`, `pace` and `batch` (what runs), `room` and `preemption` (who gets the last blocks), `swapping` (to
the host and back), `results` (what came out).
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.common.base.errors import (
    InvariantError,
    ProtocolError,
)
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
from kvferry.common.scheduling.step_planner import (
    MayStart,
    StepPlanner,
)
from kvferry.common.scheduling.swapping import Swapping
from kvferry.common.scheduling.waiting_queue import PrefillRate, WaitingQueue


class Scheduled(NamedTuple):
    """What `schedule` answers."""

    plan: StepBatch | None
    """None: nothing to run now."""
    events: list[SchedulerEvent]
    """Started, Prefilled (nothing was left to compute), Preempted."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks kept for a sequence whose KV comes from elsewhere."""

    seq_id: int
    first_token: int
    """Position from which KV is lacked, a multiple of the block size. It may equal the number of known ids: then
    everything is cached and no KV needs to come."""
    block_table: tuple[int, ...]


class Scheduler:
    """Owns the sequences of a node and decides what runs next. See the module's docstring for a sequence's life.

    Unless said otherwise a method raises InvariantError for a sequence it does not know (any more) or that is in a
    status where the call makes no sense; nothing is changed then.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, host: HostPool | None = None) -> None:
        """`host`: where sequences are swapped to when `pool` is full. None: nowhere."""
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
        self._pace = PrefillRate()
        self._in_flight: deque[StepBatch] = deque()
        self._num_steps = 0
        self._events: list[SchedulerEvent] = []
        """To be told by the next `schedule`."""

    # --- sequences come ---

    def add(self, spec: SequenceSpec, now: float) -> int:
        """Queue a sequence; returns its seq_id. RequestInvalidError: it could never run here, or breaks a rule."""
        self._admission.check(spec)
        return self._enqueue(self._create_waiting(spec))

    def inherit_blocks(self, old_seq_id: int, spec: SequenceSpec, now: float) -> int:
        """Like `add`, with the blocks of an earlier attempt, which ends by it.

        Starts past the queue if these suffice with what is free (its `Started` comes with the next `schedule`), else
        it queues and finds them as prefix cache.
        """
        self._admission.check(spec)
        old = self._table.get(old_seq_id)
        if old.status is SequenceStatus.ENDED:
            raise InvariantError(f"sequence {old_seq_id} has ended: its blocks cannot be taken over")
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
        """RequestInvalidError: it could never run here to its end, or breaks a rule. Looks at every id."""
        self._admission.check(spec, to_the_end=True)

    def reserve(self, spec: SequenceSpec, now: float) -> Reservation | None:
        """Keep blocks for KV from another node, all or nothing. None: full (blocks, watermark, share, max_running).

        The spec must have passed `check`: once, when it came, however often it is tried.
        """
        table = self._admission.reserve(spec, self._table.next_id)
        if table is None:
            return None
        seq = self._table.create(spec, SequenceStatus.RESERVED)
        seq.set_computed(table.num_cached_tokens)
        return Reservation(seq.seq_id, table.num_cached_tokens, table.block_ids)

    def commit(self, seq_id: int) -> None:
        """RESERVED -> COMMITTED: no longer counted among the uncommitted reservations."""
        self._table.move(self._table.get(seq_id, SequenceStatus.RESERVED), SequenceStatus.COMMITTED)

    def activate(self, seq_id: int, next_token: int, num_tokens: int, now: float) -> list[SchedulerEvent]:
        """RESERVED or COMMITTED -> DECODING: positions 0 .. num_tokens - 1 have KV, next_token is at num_tokens.

        num_tokens is the number of known ids, or one less (then next_token must be the last known id, an output
        token), and next_token is of the vocabulary; ProtocolError otherwise, and nothing is changed. Answers Sampled
        for next_token (the stream starts with it), and Finished when that token ends it.
        """
        seq = self._table.get(seq_id, SequenceStatus.RESERVED, SequenceStatus.COMMITTED)
        known = seq.spec.num_known
        if next_token >= self._config.vocab_size:
            raise ProtocolError(f"id {next_token} is outside the vocabulary [0, {self._config.vocab_size})")
        goes_on_from_last = seq.spec.is_retry and num_tokens == known - 1 and next_token == seq.token_ids[-1]
        if num_tokens != known and not goes_on_from_last:
            raise ProtocolError(f"handed over {num_tokens} tokens and id {next_token}, but {known} ids are known")
        self._table.move(seq, SequenceStatus.DECODING)
        seq.set_computed(num_tokens)
        self._pool.publish(seq_id, seq.token_ids, num_tokens)
        if num_tokens == known:
            seq.token_ids.append(next_token)
        events: list[SchedulerEvent] = []
        self._results.accept_token(seq, events)
        return events

    # --- sequences change and go ---

    def release(self, seq_id: int) -> None:
        """End a PREFILLED, RESERVED or COMMITTED sequence; what is computed stays as prefix cache."""
        self._table.get(seq_id, SequenceStatus.PREFILLED, SequenceStatus.RESERVED, SequenceStatus.COMMITTED)
        self.abort(seq_id)

    def abort(self, seq_id: int) -> None:
        """End a sequence in whatever status; a token still being drawn for it is dropped. No event follows."""
        seq = self._table.get(seq_id)
        if seq.status is SequenceStatus.WAITING and seq_id in self._queue:
            self._queue.remove(seq_id)
        self._table.end(seq)
        self._events = [event for event in self._events if event.seq_id != seq_id]

    def pause(self, seq_id: int) -> None:
        """COMPUTING -> PAUSED: no further chunk until `resume`; blocks are kept. A chunk in flight still counts: if
        it was the last one, the sequence goes on to PREFILLED or DECODING as if there had been no pause."""
        self._table.move(self._table.get(seq_id, SequenceStatus.COMPUTING), SequenceStatus.PAUSED)

    def resume(self, seq_id: int) -> None:
        """PAUSED -> COMPUTING."""
        self._table.move(self._table.get(seq_id, SequenceStatus.PAUSED), SequenceStatus.COMPUTING)

    def pin(self, seq_id: int) -> None:
        """Somebody besides the engine (a transport) touches the blocks: they are not freed before `unpin`. Counted."""
        self._table.pin(seq_id)

    def unpin(self, seq_id: int) -> None:
        """Take one `pin` back; works on an ended sequence too, whose blocks are then freed."""
        self._table.unpin(seq_id)

    # --- steps ---

    def schedule(self, now: float, may_start: MayStart | None = None) -> Scheduled:
        """Plan the next step: decoding sequences first, then prompts. It may hold nothing but copies.

        While one is in flight: for the tokens that it draws as well, or not at all if somebody lacks a block for that.
        `may_start` is asked for the head of the queue before it starts; False keeps it there, and all behind it.
        """
        events, self._events = self._events, []
        if not len(self._table) or len(self._in_flight) >= self._config.max_steps_in_flight:
            return Scheduled(None, events)
        if self._in_flight and not self._preemption.make_ahead():
            return Scheduled(None, events)
        batch = StepBuilder(self._config.max_step_tokens)
        self._planner.fill(batch, now, may_start or _always, events)
        return Scheduled(self._seal(batch), events)

    def apply(self, result: StepResult, now: float) -> list[SchedulerEvent]:
        """Take in the result of the oldest step in flight. InvariantError: another step, or a token is missing."""
        if not self._in_flight or self._in_flight[0].step_id != result.step_id:
            raise InvariantError(f"result of step {result.step_id}, which is not the oldest in flight")
        check_result(self._in_flight[0], result)
        plan = self._in_flight.popleft()
        self._pace.seen(plan, result.duration_s)
        return self._results.apply(plan, result)

    # --- numbers ---

    def status(self, seq_id: int) -> SequenceStatus | None:
        """None: not known (any more)."""
        seq = self._table.find(seq_id)
        return None if seq is None else seq.status

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """Its blocks, in order of position; empty while it waits or is swapped out."""
        self._table.get(seq_id)
        return self._pool.table(seq_id) if self._pool.holds(seq_id) else ()

    def num_computed_tokens(self, seq_id: int) -> int:
        """Positions 0 .. n - 1 have KV, here or on the host (of a reservation: those pinned from the prefix cache)."""
        return self._table.get(seq_id).num_computed_tokens

    def is_in_step(self, seq_id: int) -> bool:
        """Whether a step in flight computes something of it."""
        return self._table.get(seq_id).steps_in_flight > 0

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def work_waiting(self) -> bool:
        """Whether a step is in flight or some sequence could run: a healthy engine makes steps then.

        What is swapped out, or has no place for its next token while no block is free, waits for blocks, not for the
        engine.
        """
        if self._in_flight or self._table.members(SequenceStatus.COMPUTING):
            return True
        return any(self._preemption.can_run(seq) for seq in self._table.members(SequenceStatus.DECODING).values())

    @property
    def is_starved(self) -> bool:
        """Whether something decodes or is swapped out, and nothing can run: reservations or others that wait have the
        blocks."""
        return not self.work_waiting and self._table.count(SequenceStatus.DECODING, SequenceStatus.SWAPPED) > 0

    @property
    def has_events(self) -> bool:
        """Whether `schedule` has events to tell even if it plans nothing."""
        return bool(self._events)

    def load(self) -> NodeLoad:
        """Numbers for Status."""
        under_way = [
            *self._table.members(SequenceStatus.COMPUTING).values(),
            *self._table.members(SequenceStatus.PAUSED).values(),
        ]
        running = (
            SequenceStatus.COMPUTING,
            SequenceStatus.PAUSED,
            SequenceStatus.PREFILLED,
            SequenceStatus.COMMITTED,
            SequenceStatus.DECODING,
            *SWAPPED_OUT,
        )
        return NodeLoad(
            waiting_requests=len(self._queue),
            waiting_tokens=self._queue.total_tokens
            + sum(len(seq.token_ids) - seq.num_computed_tokens for seq in under_way),
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
        """No sequence, no step in flight, no block held here or on the host."""
        return not (len(self._table) or self._in_flight or self._pool.num_held or self._host.num_held)

    # --- inside ---

    def _create_waiting(self, spec: SequenceSpec) -> Sequence:
        seq = self._table.create(spec, SequenceStatus.WAITING)
        seq.virtual_finish_time = self._pace.virtual_finish_time(spec.accepted_at, spec.num_known)
        return seq

    def _enqueue(self, seq: Sequence) -> int:
        self._queue.push(seq.seq_id, seq.spec.priority, seq.virtual_finish_time, seq.spec.num_known)
        return seq.seq_id

    def _seal(self, batch: StepBuilder) -> StepBatch | None:
        if batch.is_empty:
            return None
        self._num_steps += 1
        plan = batch.seal(self._num_steps, self._pool, self._table.take_finished())
        self._in_flight.append(plan)
        return plan

    def check_invariants(self) -> None:
        """Raise InvariantError when sequences, queue, steps and blocks do not agree."""
        self._pool.check_invariants()
        self._queue.check_invariants()
        self._swapping.check_invariants(list(self._in_flight))
        self._table.check_invariants(Counter(seq_id for plan in self._in_flight for seq_id in plan.touched))
        waiting = self._table.members(SequenceStatus.WAITING)
        if len(waiting) != len(self._queue) or any(seq_id not in self._queue for seq_id in waiting):
            raise InvariantError("scheduler: the queue and the waiting sequences differ")
        if self._admission.num_running > self._config.max_running:
            raise InvariantError("scheduler: more run than max_running")
        self._check_draws()
        for part in (part for plan in self._in_flight for part in plan.scheduled):
            if not self._pool.is_writable(part.seq_id, part.start_position, part.start_position + len(part.token_ids)):
                raise InvariantError(f"scheduler: sequence {part.seq_id} writes a block that is final or shared")

    def _check_draws(self) -> None:
        """Sequences know how many tokens are drawn for them, and nothing is computed while one is copied away to make
        room. (One that ended meanwhile makes none before that step is back.)"""
        draws = Counter(part.seq_id for plan in self._in_flight for part in plan.scheduled if part.sample)
        if draws != Counter(self._table.num_undrawn):
            raise InvariantError("scheduler: counts of tokens being drawn are wrong")
        if len(self._in_flight) > 1 and self._table.count(SequenceStatus.SWAPPING):
            raise InvariantError("scheduler: a step that copies sequences away is not alone in flight")


def _always(_: SequenceSpec) -> bool:
    return True
