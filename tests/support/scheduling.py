"""A scheduler with a model runner that computes nothing but remembers what was written into which cache slot.

Every step is checked against the contract of `common.scheduling.step`: announcements, positions, and that the slots
below a chunk hold exactly the ids of its sequence. A block that was shared wrongly or freed too early shows there.
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

VOCAB = 40


def ids(values: Iterable[int]) -> "array[int]":
    """Token ids."""
    return array("I", values)


def next_token(token_ids: "array[int]") -> int:
    """What the fake model draws: depends on all ids before it and on nothing else."""
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
    """A spec; a number as prompt means that many distinct ids."""
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


class FakeRunner:
    """Cache slots as a dict; sequences as the runner knows them from `new` and `finished`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self.host_slots: dict[int, int] = {}
        self.known: dict[int, array[int]] = {}
        self.ever_known: set[int] = set()
        self.drawn = TokensInFlight()

    def slot(self, table: tuple[int, ...], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def write(self, table: tuple[int, ...], start: int, token_ids: Iterable[int]) -> None:
        """As the kernels do, or a transport."""
        for position, token_id in enumerate(token_ids, start):
            self.slots[self.slot(table, position)] = token_id

    def read(self, table: tuple[int, ...], end: int) -> "array[int]":
        return ids(self.slots[self.slot(table, position)] for position in range(end))

    def run(self, plan: StepBatch) -> StepResult:
        """Compute a step as if all of it happened now."""
        plan = self.drawn.fill(plan)
        self._copy(plan)
        for seq_id in plan.finished:
            del self.known[seq_id]
        for new in plan.new:
            assert new.seq_id not in self.ever_known, "announced twice"
            self.ever_known.add(new.seq_id)
            self.known[new.seq_id] = array("I", new.token_ids)
        result = StepResult(
            plan.step_id, {part.seq_id: self._draw(part) for part in plan.scheduled if self._compute(part)}
        )
        self.drawn.note(result)
        return result

    def _copy(self, plan: StepBatch) -> None:
        for copies in plan.swap_out:
            self._copy_blocks(self.slots, copies.device_blocks, self.host_slots, copies.host_blocks)
        for copies in plan.swap_in:
            self._copy_blocks(self.host_slots, copies.host_blocks, self.slots, copies.device_blocks)

    def _copy_blocks(
        self, source: dict[int, int], blocks: tuple[int, ...], target: dict[int, int], to: tuple[int, ...]
    ) -> None:
        """Whole blocks, whatever is in them; 0 stands for what nobody wrote."""
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

    def _draw(self, part: ScheduledSequence) -> int:
        known = self.known[part.seq_id]
        known.append(next_token(known))
        return known[-1]


class FakeNode:
    """Pools, scheduler and runner; `step` goes once around, with all invariants checked."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_host_blocks: int = 0,
        step_s: float = 0.0,
    ) -> None:
        """step_s: how long each step says that it took."""
        self.pool = BlockPool(num_blocks, block_size, "fake")
        self.host = HostPool(num_host_blocks)
        self.scheduler = Scheduler(config or SchedulerConfig(max_running=16), self.pool, self.host)
        self.runner = FakeRunner(block_size)
        self.step_s = step_s
        self.events: list[SchedulerEvent] = []
        """All so far."""

    def schedule(self, now: float = 0.0, may_start: Callable[[SequenceSpec], bool] | None = None) -> StepBatch | None:
        plan, events = self.scheduler.schedule(now, may_start)
        self.events += events
        self.scheduler.check_invariants()
        return plan

    def finish(self, plan: StepBatch, now: float = 0.0, failed: dict[int, str] | None = None) -> list[SchedulerEvent]:
        """Run the step and hand its result in."""
        result = self.runner.run(plan)
        for seq_id in failed or {}:
            result.sampled.pop(seq_id, None)
        events = self.scheduler.apply(StepResult(result.step_id, result.sampled, failed or {}, self.step_s), now)
        self.events += events
        self.scheduler.check_invariants()
        return events

    def step(self, now: float = 0.0, may_start: Callable[[SequenceSpec], bool] | None = None) -> StepBatch | None:
        plan = self.schedule(now, may_start)
        if plan is not None:
            self.finish(plan, now)
        return plan

    def run(self, max_steps: int = 1000) -> int:
        """Steps until nothing runs; returns how many."""
        for count in range(max_steps):
            if self.step() is None:
                return count
        raise AssertionError(f"still running after {max_steps} steps")

    def of(self, seq_id: int, *kinds: type[SchedulerEvent]) -> list[Any]:
        """Events of one sequence, of some kinds."""
        return [e for e in self.events if e.seq_id == seq_id and (not kinds or isinstance(e, kinds))]

    def receive(self, seq_id: int, spec: SequenceSpec, start: int, end: int) -> None:
        """KV from another node lands in a reservation's blocks."""
        self.runner.write(self.scheduler.block_table(seq_id), start, spec.token_ids[start:end])
