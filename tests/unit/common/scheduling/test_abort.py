"""An end at any time: blocks go only when the engine and the transports are done with them, and no event follows."""

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.scheduling.events import Failed, Finished, Sampled, Started
from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceStatus
from tests.support.scheduling import FakeNode, make_spec


@pytest.fixture
def node():
    return FakeNode(SchedulerConfig(max_running=4, max_step_tokens=8))


def test_a_waiting_sequence_leaves_the_queue(node):
    seq_id = node.scheduler.add(make_spec(5), 0.0)
    node.scheduler.abort(seq_id)
    assert node.scheduler.num_waiting == 0
    assert node.scheduler.is_quiescent()
    assert node.step() is None


def test_between_steps_the_blocks_go_at_once(node):
    seq_id = node.scheduler.add(make_spec(20), 0.0)
    node.step()
    node.scheduler.abort(seq_id)
    assert node.scheduler.is_quiescent()
    assert node.events[-1] != Finished(seq_id, "stop")


@pytest.mark.parametrize("prompt_len", [5, 20], ids=["the token is dropped", "the chunk is dropped"])
def test_in_flight_the_blocks_stay_until_the_result(node, prompt_len):
    seq_id = node.scheduler.add(make_spec(prompt_len), 0.0)
    plan = node.schedule()
    table = node.scheduler.block_table(seq_id)
    node.scheduler.abort(seq_id)
    assert node.scheduler.status(seq_id) is SequenceStatus.ENDED
    assert node.scheduler.block_table(seq_id) == table
    assert node.pool.num_held == len(table)
    assert not node.scheduler.is_quiescent()
    node.scheduler.check_invariants()
    assert node.finish(plan) == [], "no event follows an abort"
    assert node.scheduler.is_quiescent()


def test_blocks_in_flight_are_given_to_nobody_else():
    node = FakeNode(SchedulerConfig(max_running=4, max_step_tokens=16, max_steps_in_flight=2), num_blocks=4)
    first = node.scheduler.add(make_spec(10, max_new_tokens=2), 0.0)
    plan = node.schedule()
    node.scheduler.abort(first)
    second = node.scheduler.add(make_spec(range(50, 60), max_new_tokens=2), 0.0)
    assert node.schedule() is None, "three of four blocks are still being written"
    assert plan is not None
    node.finish(plan)
    node.run()
    assert node.of(second, Finished) != []


def test_what_the_aborted_step_computed_is_cached(node):
    seq_id = node.scheduler.add(make_spec(8), 0.0)
    plan = node.schedule()
    node.scheduler.abort(seq_id)
    node.finish(plan)
    again = node.scheduler.add(make_spec(8), 0.0)
    node.step()
    assert node.of(again, Started) == [Started(again, 4)]


def test_an_aborted_sequence_that_fails_leaves_no_cache(node):
    seq_id = node.scheduler.add(make_spec(8), 0.0)
    plan = node.schedule()
    node.scheduler.abort(seq_id)
    assert node.finish(plan, failed={seq_id: "not a number"}) == []
    again = node.scheduler.add(make_spec(8), 0.0)
    node.step()
    assert node.of(again, Started) == [Started(again, 0)]


def test_of_two_steps_in_flight_the_later_one_counts():
    node = FakeNode(SchedulerConfig(max_running=4, max_step_tokens=8, max_steps_in_flight=2))
    seq_id = node.scheduler.add(make_spec(20), 0.0)
    plans = [node.schedule(), node.schedule()]
    node.scheduler.abort(seq_id)
    for plan in plans:
        assert node.scheduler.status(seq_id) is SequenceStatus.ENDED
        assert plan is not None
        assert node.finish(plan) == []
    assert node.scheduler.is_quiescent()


def test_the_runner_hears_of_the_end_after_the_step_in_flight():
    node = FakeNode(SchedulerConfig(max_running=4, max_step_tokens=8, max_steps_in_flight=2))
    first = node.scheduler.add(make_spec(6), 0.0)
    one = node.schedule()
    node.scheduler.abort(first)
    node.scheduler.add(make_spec(range(50, 56)), 0.0)
    two = node.schedule()
    assert one is not None
    assert two is not None
    assert two.finished == ()
    node.finish(one)
    node.finish(two)
    three = node.schedule()
    assert three is not None
    assert three.finished == (first,)


@pytest.mark.rule(21)
def test_a_pin_keeps_the_blocks_of_an_ended_sequence(node):
    seq_id = node.scheduler.add(make_spec(5, mode="prefill"), 0.0)
    node.step()
    node.scheduler.pin(seq_id)
    node.scheduler.pin(seq_id)
    table = node.scheduler.block_table(seq_id)
    node.scheduler.release(seq_id)
    assert node.scheduler.block_table(seq_id) == table
    node.scheduler.unpin(seq_id)
    assert node.scheduler.status(seq_id) is SequenceStatus.ENDED
    node.scheduler.check_invariants()
    node.scheduler.unpin(seq_id)
    assert node.scheduler.is_quiescent()


def test_a_pin_and_a_step_in_flight_must_both_end(node):
    seq_id = node.scheduler.add(make_spec(20, mode="prefill"), 0.0)
    plan = node.schedule()
    node.scheduler.pin(seq_id)
    node.scheduler.abort(seq_id)
    node.scheduler.unpin(seq_id)
    assert node.pool.num_held > 0
    node.finish(plan)
    assert node.scheduler.is_quiescent()


def test_a_pinned_sequence_may_finish_and_its_blocks_stay(node):
    seq_id = node.scheduler.add(make_spec(10, max_new_tokens=1, mode="prefill"), 0.0)
    node.step()
    node.scheduler.pin(seq_id)
    node.run()
    assert node.of(seq_id, Finished) == [Finished(seq_id, "length")]
    assert node.pool.num_held > 0
    node.scheduler.unpin(seq_id)
    assert node.scheduler.is_quiescent()


def test_wrong_pins_raise(node):
    waiting = node.scheduler.add(make_spec(20), 0.0)
    with pytest.raises(InvariantError, match="no blocks to pin"):
        node.scheduler.pin(waiting)
    with pytest.raises(InvariantError, match="not pinned"):
        node.scheduler.unpin(waiting)
    node.schedule()
    node.scheduler.abort(waiting)
    with pytest.raises(InvariantError, match="no blocks to pin"):
        node.scheduler.pin(waiting)


@pytest.mark.parametrize("call", ["abort", "release", "commit", "pause", "resume", "pin"])
def test_an_unknown_sequence_raises(node, call):
    with pytest.raises(InvariantError, match="not known"):
        getattr(node.scheduler, call)(77)
    assert node.scheduler.status(77) is None


@pytest.mark.parametrize("call", ["release", "commit", "resume"])
def test_a_call_that_makes_no_sense_raises_and_changes_nothing(node, call):
    seq_id = node.scheduler.add(make_spec(20), 0.0)
    node.step()
    with pytest.raises(InvariantError, match="is computing, not"):
        getattr(node.scheduler, call)(seq_id)
    assert node.scheduler.status(seq_id) is SequenceStatus.COMPUTING


def test_a_second_abort_raises(node):
    seq_id = node.scheduler.add(make_spec(20), 0.0)
    node.schedule()
    node.scheduler.abort(seq_id)
    with pytest.raises(InvariantError, match="may not go to ended"):
        node.scheduler.abort(seq_id)


def test_an_abort_while_decoding_drops_the_token_in_flight(node):
    seq_id = node.scheduler.add(make_spec(5, max_new_tokens=9), 0.0)
    node.step()
    plan = node.schedule()
    node.scheduler.abort(seq_id)
    node.finish(plan)
    assert len(node.of(seq_id, Sampled)) == 1
    assert node.scheduler.is_quiescent()


def test_after_a_failure_nothing_of_it_is_found_even_while_it_is_pinned():
    node = FakeNode(SchedulerConfig(max_running=4, max_step_tokens=8, max_steps_in_flight=2))
    bad = node.scheduler.add(make_spec(20, mode="prefill"), 0.0)
    node.step()
    node.scheduler.pin(bad)
    plans = [node.schedule(), node.schedule()]
    assert plans[0] is not None
    assert plans[1] is not None
    assert node.finish(plans[0], failed={bad: "not a number"}) == [Failed(bad, "not a number")]
    assert node.finish(plans[1]) == [], "told once"
    again = node.scheduler.add(make_spec(20, mode="prefill"), 0.0)
    node.step()
    assert node.of(again, Started) == [Started(again, 0)]
    node.run()
    third = node.scheduler.add(make_spec(21, mode="prefill"), 0.0)
    node.run()
    assert node.of(third, Started) == [Started(third, 20)]
    assert node.scheduler.block_table(third)[:5] == node.scheduler.block_table(again)[:5]
    node.scheduler.unpin(bad)
    node.scheduler.release(again)
    node.scheduler.release(third)
    assert node.scheduler.is_quiescent()
