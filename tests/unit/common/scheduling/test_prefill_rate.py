"""Whose turn it is among prompts of one class: by acceptance and by how long each takes."""

from array import array

import pytest

from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceStatus
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch
from kvferry.common.scheduling.waiting_queue import PrefillRate
from tests.support.scheduling import FakeNode, make_spec


def plan_of(*sizes: int) -> StepBatch:
    parts = (ScheduledSequence(n, array("I", [0] * size), 0, (0,), sample=False) for n, size in enumerate(sizes))
    return StepBatch(1, tuple(parts))


def test_nothing_is_known_at_first():
    assert PrefillRate().virtual_finish_time(3.0, 1000) == 3.0


def test_a_turn_is_when_it_would_be_computed_alone():
    pace = PrefillRate()
    pace.seen(plan_of(400, 100), 1.0)
    assert pace.virtual_finish_time(3.0, 1000) == pytest.approx(3.0 + 2.0)


def test_steps_that_mostly_decode_say_nothing():
    pace = PrefillRate()
    pace.seen(plan_of(2, 1, 1), 1.0)
    pace.seen(plan_of(1), 1.0)
    pace.seen(plan_of(), 1.0)
    assert pace.prompt_token_s == 0.0


def test_what_is_known_follows_the_node():
    pace = PrefillRate()
    pace.seen(plan_of(100), 0.1)
    for _ in range(60):
        pace.seen(plan_of(100), 0.4)
    assert pace.prompt_token_s == pytest.approx(0.004, rel=0.01)


class Timed:
    """A node whose steps take 8 tokens, a second each, and which has made one."""

    def __init__(self) -> None:
        config = SchedulerConfig(max_running=4, max_step_tokens=8)
        self.node = FakeNode(config, num_blocks=40, step_s=1.0)
        self.add(8, 500, max_new_tokens=1)
        self.turn()

    def add(self, size: int, first_id: int, at: float = 0.0, **more) -> int:
        return self.node.scheduler.add(make_spec(range(first_id, first_id + size), accepted_at=at, **more), at)

    def turn(self, now: float = 0.0) -> list[int]:
        """Whose tokens the next step has."""
        plan = self.node.step(now)
        assert plan is not None
        return [part.seq_id for part in plan.scheduled]


@pytest.fixture
def timed():
    return Timed()


@pytest.mark.rule(17)
def test_a_short_prompt_passes_a_long_one_that_came_a_little_earlier(timed):
    long = timed.add(40, 100)
    assert timed.turn() == [long]
    short = timed.add(8, 50, at=1.0, max_new_tokens=1)
    assert timed.turn(1.0) == [short]
    assert timed.turn(2.0) == [long]


@pytest.mark.rule(17)
def test_a_long_prompt_is_passed_only_by_what_comes_within_its_own_time(timed):
    long = timed.add(40, 100)
    timed.turn()
    late = timed.add(8, 50, at=4.5, max_new_tokens=1)
    assert timed.turn(4.5) == [long]
    assert timed.node.scheduler.status(late) is SequenceStatus.WAITING


def test_prompts_of_one_length_come_in_their_order(timed):
    first = timed.add(20, 100)
    timed.turn()
    timed.add(20, 50, at=0.5)
    assert timed.turn(0.5) == [first]


def test_a_better_class_comes_before_a_shorter_prompt(timed):
    better = timed.add(40, 100, priority=2)
    timed.add(8, 50, priority=3)
    assert timed.turn() == [better]
