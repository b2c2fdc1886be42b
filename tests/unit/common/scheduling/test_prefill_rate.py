"""Order of prompts of one class: by acceptance time and prefill time."""

from array import array

import pytest

from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceStatus
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch
from kvferry.common.scheduling.waiting_queue import PrefillRate
from tests.support.scheduling import FakeNode, make_spec


def batch_of(*sizes: int) -> StepBatch:
    parts = (ScheduledSequence(n, array("I", [0] * size), 0, (0,), sample=False) for n, size in enumerate(sizes))
    return StepBatch(1, tuple(parts))


def test_without_a_measurement_the_finish_time_is_the_acceptance_time():
    assert PrefillRate().virtual_finish_time(3.0, 1000) == 3.0


def test_virtual_finish_time_is_that_of_an_idle_node():
    rate = PrefillRate()
    rate.observe(batch_of(400, 100), 1.0)
    assert rate.virtual_finish_time(3.0, 1000) == pytest.approx(3.0 + 2.0)


def test_steps_that_mostly_decode_are_ignored():
    rate = PrefillRate()
    rate.observe(batch_of(2, 1, 1), 1.0)
    rate.observe(batch_of(1), 1.0)
    rate.observe(batch_of(), 1.0)
    assert rate.prompt_token_s == 0.0


def test_the_rate_follows_recent_steps():
    rate = PrefillRate()
    rate.observe(batch_of(100), 0.1)
    for _ in range(60):
        rate.observe(batch_of(100), 0.4)
    assert rate.prompt_token_s == pytest.approx(0.004, rel=0.01)


class Timed:
    """A node whose steps have 8 tokens and take a second each, after its first step."""

    def __init__(self) -> None:
        config = SchedulerConfig(max_running=4, max_step_tokens=8)
        self.node = FakeNode(config, num_blocks=40, step_s=1.0)
        self.add(8, 500, max_new_tokens=1)
        self.step()

    def add(self, size: int, first_id: int, at: float = 0.0, **more) -> int:
        return self.node.scheduler.add(make_spec(range(first_id, first_id + size), accepted_at=at, **more), at)

    def step(self, now: float = 0.0) -> list[int]:
        """Sequences in the next step."""
        batch = self.node.step(now)
        assert batch is not None
        return [part.seq_id for part in batch.scheduled]


@pytest.fixture
def timed():
    return Timed()


@pytest.mark.rule(17)
def test_a_short_prompt_overtakes_a_slightly_earlier_long_one(timed):
    long = timed.add(40, 100)
    assert timed.step() == [long]
    short = timed.add(8, 50, at=1.0, max_new_tokens=1)
    assert timed.step(1.0) == [short]
    assert timed.step(2.0) == [long]


@pytest.mark.rule(17)
def test_a_long_prompt_is_overtaken_only_within_its_own_prefill_time(timed):
    long = timed.add(40, 100)
    timed.step()
    late = timed.add(8, 50, at=4.5, max_new_tokens=1)
    assert timed.step(4.5) == [long]
    assert timed.node.scheduler.status(late) is SequenceStatus.WAITING


def test_prompts_of_equal_length_run_in_order_of_arrival(timed):
    first = timed.add(20, 100)
    timed.step()
    timed.add(20, 50, at=0.5)
    assert timed.step(0.5) == [first]


def test_a_better_class_runs_before_a_shorter_prompt(timed):
    better = timed.add(40, 100, priority=2)
    timed.add(8, 50, priority=3)
    assert timed.step() == [better]
