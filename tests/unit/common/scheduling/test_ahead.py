"""Steps planned ahead of a token that is still being drawn: who gets one, what becomes of it, and whose blocks stay."""

from array import array

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.scheduling.events import Failed, Finished, Preempted, Sampled
from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceStatus
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch
from tests.support.scheduling import FakeNode, ids, make_spec, next_token


def make_node(num_blocks: int = 64, num_host_blocks: int = 0, **config: object) -> FakeNode:
    settings = {"max_running": 4, "max_step_tokens": 16, "max_steps_in_flight": 2, "watermark_blocks_share": 0.0}
    return FakeNode(
        SchedulerConfig(**{**settings, **config}),  # type: ignore[arg-type]
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
    )


def planned(node: FakeNode) -> StepBatch:
    plan = node.schedule()
    assert plan is not None
    return plan


def decoding(node: FakeNode, prompt: int = 3, **spec: object) -> int:
    """A sequence whose first token is drawn, with no step in flight."""
    seq_id = node.scheduler.add(make_spec(prompt, **spec), 0.0)  # type: ignore[arg-type]
    while node.scheduler.status(seq_id) is not SequenceStatus.DECODING:
        node.step()
    return seq_id


def tokens(node: FakeNode, seq_id: int) -> list[int]:
    return [event.token_id for event in node.of(seq_id, Sampled)]


def drawn(prompt: int, count: int) -> list[int]:
    known = ids(range(1000, 1000 + prompt))
    for _ in range(count):
        known.append(next_token(known))
    return list(known[prompt:])


def test_a_step_says_that_its_id_is_what_the_step_before_draws():
    node = make_node()
    seq_id = decoding(node)
    first, second = planned(node), planned(node)
    [part] = first.scheduled
    assert (part.token_ids, part.start_position, part.after_draw) == (ids(drawn(3, 1)), 3, False)
    table = node.scheduler.block_table(seq_id)
    assert second.scheduled == (ScheduledSequence(seq_id, array("I", [0]), 4, table, True, 5, after_draw=True),)


def test_only_one_token_is_planned_for_before_it_is_known():
    node = make_node(max_steps_in_flight=3)
    decoding(node)
    first, second = planned(node), planned(node)
    assert node.schedule() is None
    node.finish(first)
    third = planned(node)
    assert [part.after_draw for part in third.scheduled] == [True]
    assert node.schedule() is None
    node.finish(second)


def test_tokens_are_those_of_single_steps_and_a_step_is_in_flight_all_the_time():
    node = make_node()
    seq_id = decoding(node, max_new_tokens=12)
    plan = planned(node)
    for _ in range(10):
        following = planned(node)
        assert [part.after_draw for part in following.scheduled] == [True]
        node.finish(plan)
        plan = following
    assert node.schedule() is None, "the last one is being drawn"
    node.finish(plan)
    assert tokens(node, seq_id) == drawn(3, 12)
    assert node.of(seq_id, Finished) == [Finished(seq_id, "length")]
    assert node.scheduler.is_quiescent()


@pytest.mark.rule(31)
def test_nothing_is_planned_behind_the_last_token():
    node = make_node()
    decoding(node, max_new_tokens=2)
    planned(node)
    assert node.schedule() is None


def test_nothing_is_planned_behind_the_end_of_a_prompt():
    node = make_node()
    node.scheduler.add(make_spec(3), 0.0)
    planned(node)
    assert node.schedule() is None


@pytest.mark.rule(5)
def test_what_comes_after_the_end_is_dropped_and_the_blocks_stay_till_then():
    node = make_node()
    end = drawn(3, 2)[1]
    seq_id = decoding(node, stop_token_ids=(end,))
    first, second = planned(node), planned(node)
    table = node.scheduler.block_table(seq_id)
    assert node.finish(first) == [Sampled(seq_id, end, 4, 1), Finished(seq_id, "stop")]
    assert node.scheduler.status(seq_id) is SequenceStatus.ENDED
    assert node.scheduler.block_table(seq_id) == table
    assert planned_ids(node) == []
    assert node.finish(second) == []
    assert node.scheduler.is_quiescent()


def planned_ids(node: FakeNode) -> list[int]:
    plan = node.schedule()
    return [] if plan is None else [part.seq_id for part in plan.scheduled]


def test_nobody_gets_the_blocks_of_one_that_ended_before_the_step_ahead_is_back():
    node = make_node(num_blocks=2)
    end = drawn(3, 2)[1]
    seq_id = decoding(node, stop_token_ids=(end,), max_new_tokens=5)
    first, second = planned(node), planned(node)
    assert len(node.scheduler.block_table(seq_id)) == 2
    node.finish(first)
    other = node.scheduler.add(make_spec(range(50, 53), max_new_tokens=2), 0.0)
    assert node.schedule() is None
    node.finish(second)
    assert planned_ids(node) == [other]


def test_the_whole_block_before_the_end_is_found_again():
    """Positions 4 to 7 are computed with the token that ends it as the last of them."""
    node = make_node()
    end = drawn(6, 2)[1]
    decoding(node, 6, stop_token_ids=(end,))
    first, second = planned(node), planned(node)
    node.finish(first)
    node.finish(second)
    again = node.scheduler.reserve(make_spec(ids(range(1000, 1006)), drawn(6, 2)), 0.0)
    assert again is not None
    assert again.first_token == 4, "of a re-plan not the last id"
    longer = node.scheduler.reserve(make_spec(ids([*range(1000, 1006), *drawn(6, 2), 7])), 0.0)
    assert longer is not None
    assert longer.first_token == 8


@pytest.mark.parametrize("prompt", [3, 5, 6])
def test_an_abort_between_two_steps_drops_both(prompt: int):
    """With 6 the position of which no id is kept would be the last of a block."""
    node = make_node()
    seq_id = decoding(node, prompt)
    first, second = planned(node), planned(node)
    node.scheduler.abort(seq_id)
    node.scheduler.check_invariants()
    assert node.finish(first) == []
    assert node.scheduler.status(seq_id) is SequenceStatus.ENDED
    assert node.finish(second) == []
    assert node.scheduler.is_quiescent()


def test_an_aborted_one_that_is_pinned_keeps_its_blocks_alone():
    node = make_node()
    seq_id = decoding(node, 6)
    first, second = planned(node), planned(node)
    node.scheduler.pin(seq_id)
    node.scheduler.abort(seq_id)
    node.finish(first)
    node.finish(second)
    assert node.scheduler.num_computed_tokens(seq_id) == 7
    node.scheduler.unpin(seq_id)
    assert node.scheduler.is_quiescent()


@pytest.mark.parametrize("both", [False, True])
def test_after_a_failure_the_step_ahead_counts_for_nothing(both: bool):
    node = make_node()
    seq_id = decoding(node, 6)
    other = decoding(node, 4, priority=5)
    first, second = planned(node), planned(node)
    events = node.finish(first, failed={seq_id: "not a number"})
    assert [event for event in events if event.seq_id == seq_id] == [Failed(seq_id, "not a number")]
    assert node.scheduler.status(seq_id) is SequenceStatus.ENDED
    events = node.finish(second, failed={seq_id: "not a number"} if both else {})
    assert [type(event) for event in events] == [Sampled]
    assert node.scheduler.status(seq_id) is None
    node.run()
    assert tokens(node, other) == drawn(4, 8)
    again = node.scheduler.reserve(make_spec(12), 0.0)
    assert again is not None
    assert again.first_token == 0, "nothing of the failed one is found"


def test_a_step_ahead_that_fails_fails_the_sequence():
    node = make_node()
    seq_id = decoding(node)
    first, second = planned(node), planned(node)
    node.finish(first)
    third = planned(node)
    assert node.finish(second, failed={seq_id: "x"}) == [Failed(seq_id, "x")]
    assert node.finish(third) == []
    assert node.scheduler.is_quiescent()


def test_one_that_joins_is_in_step_with_the_others_from_then_on():
    node = make_node()
    first = decoding(node)
    plan = planned(node)
    other = node.scheduler.add(make_spec(range(50, 53)), 0.0)
    following = planned(node)
    assert [(part.seq_id, part.after_draw) for part in following.scheduled] == [(first, True), (other, False)]
    node.finish(plan)
    plan, following = following, planned(node)
    assert [part.seq_id for part in following.scheduled] == [first], "its prompt is in flight"
    node.finish(plan)
    both = planned(node)
    assert [(part.seq_id, part.after_draw) for part in both.scheduled] == [(first, True), (other, False)]
    node.finish(following)
    both = planned(node)
    assert [(part.seq_id, part.after_draw) for part in both.scheduled] == [(first, True), (other, True)]


def test_a_block_is_taken_for_a_step_ahead():
    node = make_node(num_blocks=2)
    seq_id = decoding(node, 3, max_new_tokens=4)
    assert len(node.scheduler.block_table(seq_id)) == 1
    planned(node)
    assert planned_ids(node) == [seq_id]
    assert len(node.scheduler.block_table(seq_id)) == 2


def test_while_blocks_are_short_for_one_nobody_goes_ahead():
    node = make_node(num_blocks=3)
    node.scheduler.add(make_spec(3, max_new_tokens=6), 0.0)
    node.scheduler.add(make_spec(5, max_new_tokens=4), 0.0)
    node.step()
    assert node.pool.num_free == 0
    assert len(planned(node).scheduled) == 2
    assert node.schedule() is None, "the first has no place for the token behind the one that is being drawn"
    node.scheduler.add(make_spec([9]), 0.0)
    assert node.schedule() is None, "nor does a prompt begin"


@pytest.mark.rule(36)
def test_who_gives_blocks_is_in_no_step():
    """All three lack a block at the same time, and one is free: the worst gives its own."""
    node = make_node(num_blocks=4)
    best, middle, worst = (
        node.scheduler.add(make_spec([9, number], max_new_tokens=9, priority=number), 0.0) for number in (1, 3, 5)
    )
    node.step()
    first, second = planned(node), planned(node)
    node.finish(first)
    assert node.schedule() is None, "it would have to be taken from a step"
    node.finish(second)
    assert [part.seq_id for part in planned(node).scheduled] == [best, middle]
    assert node.of(worst, Preempted) == [Preempted(worst)]


def test_nothing_is_planned_ahead_while_somebody_is_on_the_host():
    node = make_node(num_blocks=3, num_host_blocks=4)
    best, worst = decoding(node, 6, max_new_tokens=5, priority=1), decoding(node, 2, max_new_tokens=9, priority=5)
    statuses = set()
    while node.scheduler.status(best) is not None:
        plan = planned(node)
        status = node.scheduler.status(worst)
        statuses.add(status)
        if status in (SequenceStatus.SWAPPING, SequenceStatus.SWAPPED):
            assert node.schedule() is None
        node.finish(plan)
    assert {SequenceStatus.SWAPPING, SequenceStatus.SWAPPED} <= statuses
    node.run()
    assert tokens(node, worst) == drawn(2, 9)


def damage_draws(node: FakeNode, seq_id: int) -> None:
    node.scheduler._table.get(seq_id).num_undrawn = 1


def damage_length(node: FakeNode, seq_id: int) -> None:
    node.scheduler._table.get(seq_id).token_ids.extend(range(7))


def damage_scheduled(node: FakeNode, seq_id: int) -> None:
    node.scheduler._table.get(seq_id).num_scheduled_tokens += 1


@pytest.mark.parametrize("damage", [damage_draws, damage_length, damage_scheduled])
def test_invariants_know_the_bounds(damage):
    node = make_node()
    seq_id = decoding(node)
    planned(node)
    planned(node)
    damage(node, seq_id)
    with pytest.raises(InvariantError):
        node.scheduler.check_invariants()


def test_a_step_that_copies_away_is_alone_in_flight():
    node = make_node(num_blocks=3, num_host_blocks=4)
    decoding(node, 6, max_new_tokens=5, priority=1)
    worst = decoding(node, 2, max_new_tokens=9, priority=5)
    while True:
        plan = planned(node)
        if node.scheduler.status(worst) is SequenceStatus.SWAPPING:
            break
        node.finish(plan)
    node.scheduler._in_flight.append(StepBatch(99, ()))
    with pytest.raises(InvariantError, match="alone"):
        node.scheduler.check_invariants()


def test_one_that_ends_while_it_is_copied_away_holds_nobody_up():
    node = make_node(num_blocks=4, num_host_blocks=4)
    best, middle, worst = (
        node.scheduler.add(make_spec(prompt, max_new_tokens=9, priority=number), 0.0)
        for number, prompt in ((1, 4), (3, [3, 4]), (5, [5, 6]))
    )
    plan = planned(node)
    while node.scheduler.status(worst) is not SequenceStatus.SWAPPING:
        node.finish(plan)
        plan = planned(node)
    table = node.scheduler.block_table(worst)
    node.scheduler.abort(middle)
    node.scheduler.abort(worst)
    assert planned_ids(node) == [best]
    assert node.scheduler.block_table(worst) == table, "they are being read"
