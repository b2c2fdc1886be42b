"""A scheduler with a fake model runner, which records the token id written to each cache slot.

The runner checks every step against the contract of `common.scheduling.step`: announcements, positions, and that the
slots below a chunk hold exactly the ids of its sequence. That detects blocks that were shared wrongly or freed too
early.
"""

from array import array
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.kv.host_pool import HostPool
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.events import SchedulerEvent
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import Mode, SchedulerConfig, SequenceSpec
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult
from kvferry.common.scheduling.tokens_in_flight import TokensInFlight
from kvferry.common.scheduling.waiting_queue import WaitingQueue

VOCAB = 40


def ids(values: Iterable[int]) -> "array[int]":
    return array("I", values)


def next_token(token_ids: "array[int]") -> int:
    """The token that the fake model samples: a function of all ids before it."""
    return crc32(token_ids.tobytes()) % VOCAB


def make_spec(
    prompt: Iterable[int] | int,
    outputs: Iterable[int] = (),
    *,
    mode: Mode = "decode",
    priority: int = 3,
    accepted_at: float = 0.0,
    max_new_tokens: int = 8,
    times_preempted: int = 0,
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
) -> SequenceSpec:
    """A spec. An int as `prompt` means that many distinct ids."""
    prompt_ids = ids(range(1000, 1000 + prompt) if isinstance(prompt, int) else prompt)
    return SequenceSpec(
        token_ids=prompt_ids + ids(outputs),
        num_prompt_tokens=len(prompt_ids),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids),
        priority=priority,
        accepted_at=accepted_at,
        mode=mode,
        times_preempted=times_preempted,
    )


def pop(queue: WaitingQueue, now: float) -> int | None:
    """Remove and return the first key; None when the queue is empty."""
    key = queue.peek(now)
    if key is not None:
        queue.remove(key)
    return key


class FakeRunner:
    """Cache slots as a dict; live sequences as announced by `new` and `finished`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self.host_slots: dict[int, int] = {}
        self.known: dict[int, array[int]] = {}
        self.ever_known: set[int] = set()
        self.tokens_in_flight = TokensInFlight()

    def slot(self, table: tuple[int, ...], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def write(self, table: tuple[int, ...], start: int, token_ids: Iterable[int]) -> None:
        """Write ids to the slots of positions start, start + 1, ..., as a kernel or a transport does."""
        for position, token_id in enumerate(token_ids, start):
            self.slots[self.slot(table, position)] = token_id

    def read(self, table: tuple[int, ...], end: int) -> "array[int]":
        return ids(self.slots[self.slot(table, position)] for position in range(end))

    def run(self, batch: StepBatch) -> StepResult:
        """Copy and compute a whole step now."""
        batch = self.tokens_in_flight.fill(batch)
        self._copy(batch)
        for seq_id in batch.finished:
            del self.known[seq_id]
        for new in batch.new:
            assert new.seq_id not in self.ever_known, "announced twice"
            self.ever_known.add(new.seq_id)
            self.known[new.seq_id] = array("I", new.token_ids)
        result = StepResult(
            batch.step_id, {part.seq_id: self._sample(part) for part in batch.scheduled if self._compute(part)}
        )
        self.tokens_in_flight.note(result)
        return result

    def _copy(self, batch: StepBatch) -> None:
        for copies in batch.swap_out:
            self._copy_blocks(self.slots, copies.device_blocks, self.host_slots, copies.host_blocks)
        for copies in batch.swap_in:
            self._copy_blocks(self.host_slots, copies.host_blocks, self.slots, copies.device_blocks)

    def _copy_blocks(
        self, source: dict[int, int], blocks: tuple[int, ...], target: dict[int, int], to: tuple[int, ...]
    ) -> None:
        """Copy whole blocks; 0 stands for an unwritten slot."""
        for block, other in zip(blocks, to, strict=True):
            for offset in range(self.block_size):
                target[other * self.block_size + offset] = source.get(block * self.block_size + offset, 0)

    def _compute(self, part: ScheduledSequence) -> bool:
        end = part.start_position + len(part.token_ids)
        known = self.known[part.seq_id]
        assert len(part.token_ids) > 0
        assert part.token_ids == known[part.start_position : end]
        assert len(part.block_table) == -(-end // self.block_size)
        assert self.read(part.block_table, part.start_position) == known[: part.start_position], "wrong KV below"
        self.write(part.block_table, part.start_position, part.token_ids)
        assert part.sample == (end == len(known))
        assert part.seed_position == (end if part.sample else -1)
        return part.sample

    def _sample(self, part: ScheduledSequence) -> int:
        known = self.known[part.seq_id]
        known.append(next_token(known))
        return known[-1]


class FakeNode:
    """Pools, scheduler and runner; `step` schedules, runs and applies one step and checks all invariants."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_host_blocks: int = 0,
        step_s: float = 0.0,
    ) -> None:
        """step_s: the duration that each step reports."""
        self.pool = BlockPool(num_blocks, block_size, "fake")
        self.host = HostPool(num_host_blocks)
        self.scheduler = Scheduler(config or SchedulerConfig(max_running=16), self.pool, self.host)
        self.runner = FakeRunner(block_size)
        self.step_s = step_s
        self.events: list[SchedulerEvent] = []
        """All events so far."""

    def schedule(self, now: float = 0.0, may_start: Callable[[SequenceSpec], bool] | None = None) -> StepBatch | None:
        batch, events = self.scheduler.schedule(now, may_start)
        self.events += events
        self.scheduler.check_invariants()
        return batch

    def finish(self, batch: StepBatch, now: float = 0.0, failed: dict[int, str] | None = None) -> list[SchedulerEvent]:
        """Run the step and apply its result."""
        result = self.runner.run(batch)
        for seq_id in failed or {}:
            result.sampled.pop(seq_id, None)
        events = self.scheduler.apply(StepResult(result.step_id, result.sampled, failed or {}, self.step_s), now)
        self.events += events
        self.scheduler.check_invariants()
        return events

    def step(self, now: float = 0.0, may_start: Callable[[SequenceSpec], bool] | None = None) -> StepBatch | None:
        batch = self.schedule(now, may_start)
        if batch is not None:
            self.finish(batch, now)
        return batch

    def run(self, max_steps: int = 1000) -> int:
        """Run steps until none is scheduled; returns their number."""
        for count in range(max_steps):
            if self.step() is None:
                return count
        raise AssertionError(f"still running after {max_steps} steps")

    def of(self, seq_id: int, *kinds: type[SchedulerEvent]) -> list[Any]:
        """Events of one sequence, optionally of some types only."""
        return [e for e in self.events if e.seq_id == seq_id and (not kinds or isinstance(e, kinds))]

    def receive(self, seq_id: int, spec: SequenceSpec, start: int, end: int) -> None:
        """Write KV from another node into a reservation's blocks."""
        self.runner.write(self.scheduler.block_table(seq_id), start, spec.token_ids[start:end])
