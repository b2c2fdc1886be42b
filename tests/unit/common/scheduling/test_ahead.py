"""Steps scheduled ahead of a token in flight: when there is one, what its result changes, which blocks are held."""

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


def scheduled(node: FakeNode) -> StepBatch:
    batch = node.schedule()
    assert batch is not None
    return batch


def decoding(node: FakeNode, prompt: int = 3, **spec: object) -> int:
    """A sequence after its first token, with no step in flight."""
    seq_id = node.scheduler.add(make_spec(prompt, **spec), 0.0)  # type: ignore[arg-type]
    while node.scheduler.status(seq_id) is not SequenceStatus.DECODING:
        node.step()
    return seq_id


def tokens(node: FakeNode, seq_id: int) -> list[int]:
    return [event.token_id for event in node.of(seq_id, Sampled)]


def expected_tokens(prompt: int, count: int) -> list[int]:
    known = ids(range(1000, 1000 + prompt))
    for _ in range(count):
        known.append(next_token(known))
    return list(known[prompt:])


def test_the_id_of_a_step_ahead_is_a_placeholder():
    node = make_node()
    seq_id = decoding(node)
    first, second = scheduled(node), scheduled(node)
    [part] = first.scheduled
    assert (part.token_ids, part.start_position, part.is_placeholder) == (ids(expected_tokens(3, 1)), 3, False)
    table = node.scheduler.block_table(seq_id)
    assert second.scheduled == (ScheduledSequence(seq_id, array("I", [0]), 4, table, True, 5, is_placeholder=True),)


def test_at_most_one_unknown_token_is_scheduled():
    node = make_node(max_steps_in_flight=3)
    decoding(node)
    first, second = scheduled(node), scheduled(node)
    assert node.schedule() is None
    node.finish(first)
    third = scheduled(node)
    assert [part.is_placeholder for part in third.scheduled] == [True]
    assert node.schedule() is None
    node.finish(second)


def test_tokens_equal_those_of_single_steps_and_a_step_is_always_in_flight():
    node = make_node()
    seq_id = decoding(node, max_new_tokens=12)
    batch = scheduled(node)
    for _ in range(10):
        following = scheduled(node)
        assert [part.is_placeholder for part in following.scheduled] == [True]
        node.finish(batch)
        batch = following
    assert node.schedule() is None, "the last token is in flight"
    node.finish(batch)
    assert tokens(node, seq_id) == expected_tokens(3, 12)
    assert node.of(seq_id, Finished) == [Finished(seq_id, "length")]
    assert node.scheduler.is_quiescent()


@pytest.mark.rule(31)
def test_no_step_is_scheduled_after_the_last_token():
    node = make_node()
    decoding(node, max_new_tokens=2)
    scheduled(node)
    assert node.schedule() is None


def test_no_step_is_scheduled_after_the_last_chunk_of_a_prompt():
    node = make_node()
    node.scheduler.add(make_spec(3), 0.0)
    scheduled(node)
    assert node.schedule() is None


@pytest.mark.rule(5)
def test_results_after_the_end_are_dropped_and_the_blocks_held_until_then():
    node = make_node()
    stop_token = expected_tokens(3, 2)[1]
    seq_id = decoding(node, stop_token_ids=(stop_token,))
    first, second = scheduled(node), scheduled(node)
    table = node.scheduler.block_table(seq_id)
    assert node.finish(first) == [Sampled(seq_id, stop_token, 4, 1), Finished(seq_id, "stop")]
    assert node.scheduler.status(seq_id) is SequenceStatus.ENDED
    assert node.scheduler.block_table(seq_id) == table
    assert scheduled_ids(node) == []
    assert node.finish(second) == []
    assert node.scheduler.is_quiescent()


def scheduled_ids(node: FakeNode) -> list[int]:
    batch = node.schedule()
    return [] if batch is None else [part.seq_id for part in batch.scheduled]


def test_blocks_of_an_ended_sequence_are_not_reused_before_the_step_ahead_is_back():
    node = make_node(num_blocks=2)
    stop_token = expected_tokens(3, 2)[1]
    seq_id = decoding(node, stop_token_ids=(stop_token,), max_new_tokens=5)
    first, second = scheduled(node), scheduled(node)
    assert len(node.scheduler.block_table(seq_id)) == 2
    node.finish(first)
    other = node.scheduler.add(make_spec(range(50, 53), max_new_tokens=2), 0.0)
    assert node.schedule() is None
    node.finish(second)
    assert scheduled_ids(node) == [other]


def test_the_last_whole_block_before_the_end_is_cached():
    """Positions 4 to 7 are computed; the token that ends the sequence is at 7."""
    node = make_node()
    stop_token = expected_tokens(6, 2)[1]
    decoding(node, 6, stop_token_ids=(stop_token,))
    first, second = scheduled(node), scheduled(node)
    node.finish(first)
    node.finish(second)
    again = node.scheduler.reserve(make_spec(ids(range(1000, 1006)), expected_tokens(6, 2)), 0.0)
    assert again is not None
    assert again.first_token == 4, "the last known output id is never taken from the cache"
    longer = node.scheduler.reserve(make_spec(ids([*range(1000, 1006), *expected_tokens(6, 2), 7])), 0.0)
    assert longer is not None
    assert longer.first_token == 8


@pytest.mark.parametrize("prompt", [3, 5, 6])
def test_an_abort_drops_both_steps_in_flight(prompt: int):
    """With 6, the position of the dropped token would be the last one of a block."""
    node = make_node()
    seq_id = decoding(node, prompt)
    first, second = scheduled(node), scheduled(node)
    node.scheduler.abort(seq_id)
    node.scheduler.check_invariants()
    assert node.finish(first) == []
    assert node.scheduler.status(seq_id) is SequenceStatus.ENDED
    assert node.finish(second) == []
    assert node.scheduler.is_quiescent()


def test_a_pinned_aborted_sequence_keeps_its_blocks():
    node = make_node()
    seq_id = decoding(node, 6)
    first, second = scheduled(node), scheduled(node)
    node.scheduler.pin(seq_id)
    node.scheduler.abort(seq_id)
    node.finish(first)
    node.finish(second)
    assert node.scheduler.num_computed_tokens(seq_id) == 7
    node.scheduler.unpin(seq_id)
    assert node.scheduler.is_quiescent()


@pytest.mark.parametrize("both", [False, True])
def test_after_a_failure_the_result_of_the_step_ahead_is_dropped(both: bool):
    node = make_node()
    seq_id = decoding(node, 6)
    other = decoding(node, 4, priority=5)
    first, second = scheduled(node), scheduled(node)
    events = node.finish(first, failed={seq_id: "not a number"})
    assert [event for event in events if event.seq_id == seq_id] == [Failed(seq_id, "not a number")]
    assert node.scheduler.status(seq_id) is SequenceStatus.ENDED
    events = node.finish(second, failed={seq_id: "not a number"} if both else {})
    assert [type(event) for event in events] == [Sampled]
    assert node.scheduler.status(seq_id) is None
    node.run()
    assert tokens(node, other) == expected_tokens(4, 8)
    again = node.scheduler.reserve(make_spec(12), 0.0)
    assert again is not None
    assert again.first_token == 0, "nothing of the failed sequence is cached"


def test_a_failure_in_the_step_ahead_fails_the_sequence():
    node = make_node()
    seq_id = decoding(node)
    first, second = scheduled(node), scheduled(node)
    node.finish(first)
    third = scheduled(node)
    assert node.finish(second, failed={seq_id: "x"}) == [Failed(seq_id, "x")]
    assert node.finish(third) == []
    assert node.scheduler.is_quiescent()


def test_a_joining_sequence_is_scheduled_ahead_after_its_prompt():
    node = make_node()
    first = decoding(node)
    batch = scheduled(node)
    other = node.scheduler.add(make_spec(range(50, 53)), 0.0)
    following = scheduled(node)
    assert [(part.seq_id, part.is_placeholder) for part in following.scheduled] == [(first, True), (other, False)]
    node.finish(batch)
    batch, following = following, scheduled(node)
    assert [part.seq_id for part in following.scheduled] == [first], "its prompt is in flight"
    node.finish(batch)
    both = scheduled(node)
    assert [(part.seq_id, part.is_placeholder) for part in both.scheduled] == [(first, True), (other, False)]
    node.finish(following)
    both = scheduled(node)
    assert [(part.seq_id, part.is_placeholder) for part in both.scheduled] == [(first, True), (other, True)]


def test_a_step_ahead_allocates_its_block():
    node = make_node(num_blocks=2)
    seq_id = decoding(node, 3, max_new_tokens=4)
    assert len(node.scheduler.block_table(seq_id)) == 1
    scheduled(node)
    assert scheduled_ids(node) == [seq_id]
    assert len(node.scheduler.block_table(seq_id)) == 2


def test_no_step_ahead_while_one_sequence_lacks_a_block():
    node = make_node(num_blocks=3)
    node.scheduler.add(make_spec(3, max_new_tokens=6), 0.0)
    node.scheduler.add(make_spec(5, max_new_tokens=4), 0.0)
    node.step()
    assert node.pool.num_free == 0
    assert len(scheduled(node).scheduled) == 2
    assert node.schedule() is None, "the first sequence has no block for the token after the one in flight"
    node.scheduler.add(make_spec([9]), 0.0)
    assert node.schedule() is None, "a prompt does not start either"


@pytest.mark.rule(36)
def test_a_preempted_sequence_is_in_no_step():
    """All three lack a block at the same time and one is free: the worst sequence is preempted."""
    node = make_node(num_blocks=4)
    best, middle, worst = (
        node.scheduler.add(make_spec([9, number], max_new_tokens=9, priority=number), 0.0) for number in (1, 3, 5)
    )
    node.step()
    first, second = scheduled(node), scheduled(node)
    node.finish(first)
    assert node.schedule() is None, "the victim would be in a step"
    node.finish(second)
    assert [part.seq_id for part in scheduled(node).scheduled] == [best, middle]
    assert node.of(worst, Preempted) == [Preempted(worst)]


def test_no_step_ahead_while_a_sequence_is_swapped_out():
    node = make_node(num_blocks=3, num_host_blocks=4)
    best, worst = decoding(node, 6, max_new_tokens=5, priority=1), decoding(node, 2, max_new_tokens=9, priority=5)
    statuses = set()
    while node.scheduler.status(best) is not None:
        batch = scheduled(node)
        status = node.scheduler.status(worst)
        statuses.add(status)
        if status in (SequenceStatus.SWAPPING, SequenceStatus.SWAPPED):
            assert node.schedule() is None
        node.finish(batch)
    assert {SequenceStatus.SWAPPING, SequenceStatus.SWAPPED} <= statuses
    node.run()
    assert tokens(node, worst) == expected_tokens(2, 9)


def damage_tokens_in_flight(node: FakeNode, seq_id: int) -> None:
    node.scheduler._table.get(seq_id).tokens_in_flight = 1


def damage_length(node: FakeNode, seq_id: int) -> None:
    node.scheduler._table.get(seq_id).token_ids.extend(range(7))


def damage_scheduled(node: FakeNode, seq_id: int) -> None:
    node.scheduler._table.get(seq_id).num_scheduled_tokens += 1


@pytest.mark.parametrize("damage", [damage_tokens_in_flight, damage_length, damage_scheduled])
def test_check_invariants_detects_wrong_counts(damage):
    node = make_node()
    seq_id = decoding(node)
    scheduled(node)
    scheduled(node)
    damage(node, seq_id)
    with pytest.raises(InvariantError):
        node.scheduler.check_invariants()


def test_a_step_that_swaps_out_is_the_only_one_in_flight():
    node = make_node(num_blocks=3, num_host_blocks=4)
    decoding(node, 6, max_new_tokens=5, priority=1)
    worst = decoding(node, 2, max_new_tokens=9, priority=5)
    while True:
        batch = scheduled(node)
        if node.scheduler.status(worst) is SequenceStatus.SWAPPING:
            break
        node.finish(batch)
    node.scheduler._in_flight.append(StepBatch(99, ()))
    with pytest.raises(InvariantError, match="not the only one"):
        node.scheduler.check_invariants()


def test_a_sequence_that_ends_during_its_swap_out_delays_no_other():
    node = make_node(num_blocks=4, num_host_blocks=4)
    best, middle, worst = (
        node.scheduler.add(make_spec(prompt, max_new_tokens=9, priority=number), 0.0)
        for number, prompt in ((1, 4), (3, [3, 4]), (5, [5, 6]))
    )
    batch = scheduled(node)
    while node.scheduler.status(worst) is not SequenceStatus.SWAPPING:
        node.finish(batch)
        batch = scheduled(node)
    table = node.scheduler.block_table(worst)
    node.scheduler.abort(middle)
    node.scheduler.abort(worst)
    assert scheduled_ids(node) == [best]
    assert node.scheduler.block_table(worst) == table, "the copy still reads them"
