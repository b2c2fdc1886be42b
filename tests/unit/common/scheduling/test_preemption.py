"""Decode out of blocks: who gives back, who never does, and that it cannot lock up."""

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.scheduling.events import Finished, Preempted
from kvferry.common.scheduling.preemption_policy import (
    best_of,
    choose_victim,
)
from kvferry.common.scheduling.sequence import SchedulerConfig, Sequence, SequenceStatus
from tests.support.scheduling import FakeNode, ids, make_spec


def seq(seq_id: int, priority: int, accepted_at: float, times_preempted: int = 0) -> Sequence:
    spec = make_spec([1], priority=priority, accepted_at=accepted_at, times_preempted=times_preempted)
    return Sequence(seq_id, spec, SequenceStatus.DECODING, ids(spec.token_ids))


def victim(sequences: list[Sequence], max_preemptions: int = 3) -> int | None:
    found = choose_victim(sequences, best_of(sequences), max_preemptions)
    return None if found is None else found.seq_id


def test_the_youngest_of_the_lowest_class():
    assert victim([seq(1, 1, 9.0), seq(2, 5, 1.0), seq(3, 5, 2.0), seq(4, 4, 3.0)]) == 3


@pytest.mark.rule(36)
def test_never_the_oldest_of_the_best_class():
    assert victim([seq(1, 2, 1.0)]) is None
    assert victim([seq(1, 2, 1.0), seq(2, 2, 0.5)]) == 1
    assert victim([]) is None


@pytest.mark.rule(36)
def test_another_one_when_the_worst_was_given_back_often_enough():
    assert victim([seq(1, 1, 0.0), seq(2, 3, 1.0), seq(3, 5, 2.0, times_preempted=3)]) == 2
    assert victim([seq(1, 1, 0.0), seq(2, 3, 1.0, 3), seq(3, 5, 2.0, 4)]) is None


def test_none_whose_blocks_are_touched():
    pinned, flying = seq(2, 5, 2.0), seq(3, 5, 3.0)
    pinned.pins = 1
    flying.steps_in_flight = 1
    assert victim([seq(1, 1, 0.0), pinned, flying, seq(4, 2, 1.0)]) == 4


def make_node(num_blocks: int) -> FakeNode:
    return FakeNode(
        SchedulerConfig(max_running=8, max_step_tokens=64, watermark_blocks_share=0.0), num_blocks=num_blocks
    )


def test_a_sequence_that_needs_a_block_takes_it_from_the_worst():
    node = make_node(6)
    best = node.scheduler.add(make_spec(7, max_new_tokens=14, priority=1), 0.0)
    worst = node.scheduler.add(make_spec(range(50, 57), max_new_tokens=14, priority=5), 0.0)
    middle = node.scheduler.add(make_spec(range(70, 77), max_new_tokens=14, priority=3), 0.0)
    node.step()
    while not node.of(worst, Preempted):
        assert node.step() is not None
    assert node.scheduler.status(worst) is None
    assert node.scheduler.load().preemptions == 1
    assert node.scheduler.status(middle) is SequenceStatus.DECODING
    node.run()
    assert node.of(best, Finished) == [Finished(best, "length")]
    assert node.of(best, Preempted) == []
    assert node.scheduler.is_quiescent()


def test_the_one_in_need_gives_itself_back_when_it_is_the_worst():
    node = make_node(4)
    best = node.scheduler.add(make_spec(6, max_new_tokens=3, priority=1), 0.0)  # never needs a third block
    worst = node.scheduler.add(make_spec(range(50, 57), max_new_tokens=9, priority=5), 0.0)
    node.run()
    assert node.of(worst, Preempted) == [Preempted(worst)]
    assert node.of(best, Finished) != []


def test_its_kv_is_found_again_as_prefix_cache():
    node = make_node(4)
    node.scheduler.add(make_spec(6, max_new_tokens=3, priority=1), 0.0)
    worst = node.scheduler.add(make_spec(range(50, 57), max_new_tokens=9, priority=5), 0.0)
    node.run()
    assert node.of(worst, Preempted) != []
    before = node.scheduler.load().prefix_hit_tokens
    node.scheduler.add(make_spec(range(50, 57), max_new_tokens=2), 0.0)
    node.run()
    assert node.scheduler.load().prefix_hit_tokens == before + 4


def test_with_nobody_to_take_from_the_best_waits_and_then_goes_on():
    node = make_node(6)
    protected = node.scheduler.add(make_spec(range(50, 57), max_new_tokens=8, priority=5, times_preempted=3), 0.0)
    best = node.scheduler.add(make_spec(7, max_new_tokens=14, priority=1), 0.0)
    node.step()
    assert len(node.scheduler.block_table(protected)) == 4, "to its end"
    plans = []
    while node.scheduler.status(best) is not None:
        plan = node.step()
        assert plan is not None
        plans.append([part.seq_id for part in plan.scheduled])
    assert [protected] in plans, "the best one had to wait"
    assert node.of(protected, Finished) != []
    assert node.of(best, Finished) != []
    assert not any(isinstance(event, Preempted) for event in node.events)


@pytest.mark.rule(10)
def test_a_reservation_holds_the_best_up_only_as_long_as_it_lasts():
    node = make_node(6)
    best = node.scheduler.add(make_spec(7, max_new_tokens=14, priority=1), 0.0)
    node.step()
    reservation = node.scheduler.reserve(make_spec(range(50, 65), max_new_tokens=2), 0.0)
    assert reservation is not None
    while node.step() is not None:
        pass
    assert node.scheduler.status(best) is SequenceStatus.DECODING
    assert (node.scheduler.work_waiting, node.scheduler.is_starved) == (False, True), "no stuck engine"
    node.scheduler.release(reservation.seq_id)
    assert (node.scheduler.work_waiting, node.scheduler.is_starved) == (True, False)
    node.run()
    assert node.of(best, Finished) != []


def test_the_best_gets_a_last_block_before_one_that_cannot_be_taken_from():
    node = make_node(5)
    pinned = node.scheduler.add(make_spec(range(50, 57), max_new_tokens=8, priority=5), 0.0)
    best = node.scheduler.add(make_spec(7, max_new_tokens=8, priority=1), 0.0)
    node.step()
    node.scheduler.pin(pinned)
    node.step()
    plan = node.step()
    assert plan is not None
    assert [part.seq_id for part in plan.scheduled] == [best]


def test_a_last_token_in_flight_needs_no_block():
    config = SchedulerConfig(max_running=4, max_step_tokens=16, max_steps_in_flight=2, watermark_blocks_share=0.0)
    node = FakeNode(config, num_blocks=3)
    best = node.scheduler.add(make_spec(7, max_new_tokens=2, priority=1), 0.0)  # 8 positions: two blocks to its end
    other = node.scheduler.reserve(make_spec([5], max_new_tokens=3, priority=5), 0.0)
    assert other is not None
    node.step()
    first = node.schedule()
    node.runner.write(other.block_table, 0, [5])
    node.scheduler.activate(other.seq_id, 9, 1, 0.0)
    second = node.schedule()
    assert first is not None
    assert second is not None
    assert [part.seq_id for part in second.scheduled] == [other.seq_id]
    node.finish(first)
    node.finish(second)
    assert node.of(best, Finished) != []
    assert node.of(other.seq_id, Preempted) == []


def damage_queue(scheduler) -> None:
    scheduler._queue.push(99, 1, 0.0, 1)


def damage_waiting(scheduler) -> None:
    scheduler._queue.remove(3)


def damage_status(scheduler) -> None:
    scheduler._table.get(1).status = SequenceStatus.PAUSED


def damage_steps(scheduler) -> None:
    scheduler._table.get(1).steps_in_flight += 1


def damage_lost_step(scheduler) -> None:
    scheduler._in_flight.clear()
    scheduler._table.get(1).steps_in_flight = 0


def damage_order(scheduler) -> None:
    scheduler._table.get(1).num_computed_tokens = 99


def damage_published(scheduler) -> None:
    scheduler._table.get(1).num_computed_tokens = 0


def damage_holder(scheduler) -> None:
    scheduler._pool.acquire(77, ids([1]), max_cached_tokens=0)


def damage_capacity(scheduler) -> None:
    holding = scheduler._pool._holdings[1]
    dropped, holding.table = holding.table[2:], holding.table[:2]
    for block in dropped:
        scheduler._pool._num_holders[block] = 0
        scheduler._pool._free.append(block)


def damage_ended(scheduler) -> None:
    scheduler._table.move(scheduler._table.get(2), SequenceStatus.ENDED)


def damage_running(scheduler) -> None:
    object.__setattr__(scheduler._config, "max_running", 0)


def damage_final(scheduler) -> None:
    scheduler._in_flight[0].scheduled[0].token_ids.extend([0] * 40)


@pytest.mark.parametrize(
    "damage", [value for name, value in list(globals().items()) if name.startswith("damage_")], ids=lambda f: f.__name__
)
def test_check_invariants_sees_every_kind_of_damage(damage):
    node = FakeNode(SchedulerConfig(max_running=2, max_step_tokens=8))
    node.scheduler.add(make_spec(20, priority=2), 0.0)
    node.scheduler.add(make_spec([5, 6], mode="prefill", priority=1), 0.0)
    node.step()
    node.scheduler.add(make_spec([7]), 0.0)
    node.schedule()
    damage(node.scheduler)
    with pytest.raises(InvariantError):
        node.scheduler.check_invariants()
