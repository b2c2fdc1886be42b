"""What one step holds and what its result does: budget, chunks, order, announcements, eos and length, failures."""

from array import array

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.scheduling.events import ChunkComputed, Failed, Finished, Sampled, Started
from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceStatus
from kvferry.common.scheduling.step import StepBatch, StepResult
from tests.support.scheduling import FakeNode, ids, make_spec, next_token


def shape(plan: StepBatch | None) -> list[tuple[int, int, int, bool]]:
    assert plan is not None
    return [(part.seq_id, part.start_position, len(part.token_ids), part.sample) for part in plan.scheduled]


def node_with(num_blocks: int = 64, **settings) -> FakeNode:
    defaults = {"max_running": 4, "max_step_tokens": 8}
    return FakeNode(SchedulerConfig(**{**defaults, **settings}), num_blocks=num_blocks)


def drawn(prompt: "array[int]", count: int) -> list[int]:
    """What an undisturbed run draws after the prompt."""
    known = ids(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return list(known[len(prompt) :])


@pytest.mark.rule(32)
def test_a_prompt_is_computed_in_chunks_and_then_decodes_to_its_length():
    node = node_with()
    spec = make_spec(18, max_new_tokens=3)
    seq_id = node.scheduler.add(spec, 0.0)
    assert shape(node.step()) == [(seq_id, 0, 8, False)]
    assert shape(node.step()) == [(seq_id, 8, 8, False)]
    assert shape(node.step()) == [(seq_id, 16, 2, True)]
    assert node.scheduler.status(seq_id) is SequenceStatus.DECODING
    assert shape(node.step()) == [(seq_id, 18, 1, True)]
    assert shape(node.step()) == [(seq_id, 19, 1, True)]
    assert node.step() is None
    tokens = drawn(spec.token_ids, 3)
    assert node.events == [
        Started(seq_id, 0),
        ChunkComputed(seq_id, 0, 8),
        ChunkComputed(seq_id, 8, 16),
        ChunkComputed(seq_id, 16, 18),
        *(Sampled(seq_id, token, 18 + index, index) for index, token in enumerate(tokens)),
        Finished(seq_id, "length"),
    ]
    assert node.scheduler.is_quiescent()


def test_decode_tokens_come_first_and_prompts_get_the_rest():
    node = node_with()
    first = node.scheduler.add(make_spec(3, max_new_tokens=20), 0.0)
    node.step()
    second = node.scheduler.add(make_spec(range(50, 70), max_new_tokens=2), 0.0)
    assert shape(node.step()) == [(first, 3, 1, True), (second, 0, 7, False)]
    assert shape(node.step()) == [(first, 4, 1, True), (second, 7, 7, False)]


def test_a_prompt_under_way_keeps_going_and_what_is_left_goes_to_the_next():
    node = node_with()
    first = node.scheduler.add(make_spec(12), 0.0)
    second = node.scheduler.add(make_spec(range(50, 60)), 0.0)
    assert shape(node.step()) == [(first, 0, 8, False)]
    assert node.scheduler.status(second) is SequenceStatus.WAITING, "no budget left: it takes no blocks yet"
    assert shape(node.step()) == [(first, 8, 4, True), (second, 0, 4, False)]


def test_a_better_class_starts_before_what_is_under_way():
    node = node_with()
    low = node.scheduler.add(make_spec(30, priority=4), 0.0)
    node.step()
    same = node.scheduler.add(make_spec(range(50, 60), priority=4, accepted_at=1.0), 1.0)
    high = node.scheduler.add(make_spec(range(70, 80), priority=1, accepted_at=1.0), 1.0)
    assert shape(node.step(1.0)) == [(high, 0, 8, False)]
    assert shape(node.step(1.0)) == [(high, 8, 2, True), (low, 8, 6, False)]
    assert node.scheduler.status(same) is SequenceStatus.WAITING


def test_ageing_ends_being_overtaken():
    node = node_with()
    low = node.scheduler.add(make_spec(30, priority=2, accepted_at=0.0), 0.0)
    node.step()
    node.scheduler.add(make_spec(range(70, 80), priority=1, accepted_at=10.0), 10.0)
    assert shape(node.step(10.0)) == [(low, 8, 8, False)]


def test_max_chunk_tokens_lets_several_prompts_go_on_together():
    node = node_with(max_chunk_tokens=3)
    first = node.scheduler.add(make_spec(20), 0.0)
    assert shape(node.step()) == [(first, 0, 8, False)], "alone it gets the whole step"
    second = node.scheduler.add(make_spec(range(50, 70)), 0.0)
    assert shape(node.step()) == [(first, 8, 5, False), (second, 0, 3, False)]


def test_a_sequence_is_announced_once_and_its_end_once():
    node = node_with()
    spec = make_spec(3, max_new_tokens=2)
    first = node.scheduler.add(spec, 0.0)
    plan = node.step()
    assert plan is not None
    assert [(new.seq_id, new.token_ids, new.sampling) for new in plan.new] == [(first, spec.token_ids, spec.sampling)]
    plan = node.step()
    assert plan is not None
    assert (plan.new, plan.finished) == ((), ())
    second = node.scheduler.add(make_spec([7], max_new_tokens=2), 0.0)
    plan = node.step()
    assert plan is not None
    assert ([new.seq_id for new in plan.new], plan.finished) == ([second], (first,))
    plan = node.step()
    assert plan is not None
    assert plan.finished == ()


def test_the_specs_ids_are_not_touched():
    node = node_with()
    spec = make_spec(3)
    before = ids(spec.token_ids)
    node.scheduler.add(spec, 0.0)
    node.run()
    assert spec.token_ids == before


def test_layers_are_reported_only_for_what_may_be_ferried():
    node = node_with()
    node.scheduler.add(make_spec(3, mode="prefill", max_new_tokens=1), 0.0)
    node.scheduler.add(make_spec(2, mode="decode"), 0.0)
    plan = node.step()
    assert plan is not None
    assert not plan.report_layers
    node.scheduler.add(make_spec([8, 9], mode="prefill", max_new_tokens=2), 0.0)
    plan = node.step()
    assert plan is not None
    assert plan.report_layers


def test_a_common_prefix_is_computed_once():
    node = node_with(max_step_tokens=32)
    node.scheduler.add(make_spec(16, max_new_tokens=1), 0.0)
    node.step()
    second = node.scheduler.add(make_spec(16, max_new_tokens=1), 0.0)
    assert shape(node.step()) == [(second, 12, 4, True)], "the last position is always computed, in a block of its own"
    assert node.of(second, Started) == [Started(second, 12)]
    assert node.scheduler.load().prefix_hit_tokens == 12


def test_generated_tokens_become_prefix_cache_too():
    node = node_with(max_step_tokens=32)
    spec = make_spec(6, max_new_tokens=7)
    node.scheduler.add(spec, 0.0)
    node.run()
    follow_up = make_spec([*spec.token_ids, *drawn(spec.token_ids, 6), 3], max_new_tokens=1)
    seq_id = node.scheduler.add(follow_up, 0.0)
    node.step()
    assert node.of(seq_id, Started) == [Started(seq_id, 12)]


@pytest.mark.parametrize(("sampling", "reason", "count"), [
    ({}, "stop", 1),
    ({"ignore_eos": True}, "length", 6),
])  # fmt: skip
def test_eos_ends_unless_it_is_to_be_ignored(sampling, reason, count):
    spec = make_spec(5, max_new_tokens=6, **sampling)
    node = node_with(eos_token_ids=frozenset(drawn(spec.token_ids, 1)))
    seq_id = node.scheduler.add(spec, 0.0)
    node.run()
    assert len(node.of(seq_id, Sampled)) == count
    assert node.of(seq_id, Finished) == [Finished(seq_id, reason)]


def test_stop_token_ids_end_like_an_eos():
    third = drawn(make_spec(5).token_ids, 3)[2]
    node = node_with()
    seq_id = node.scheduler.add(make_spec(5, max_new_tokens=9, stop_token_ids=(third,)), 0.0)
    node.run()
    assert [event.token_id for event in node.of(seq_id, Sampled)][-1] == third
    assert node.of(seq_id, Finished) == [Finished(seq_id, "stop")]


@pytest.mark.rule(31)
def test_outputs_of_earlier_attempts_count():
    node = node_with()
    seq_id = node.scheduler.add(make_spec(5, [11, 12], max_new_tokens=4), 0.0)
    node.run()
    assert [(event.position, event.index) for event in node.of(seq_id, Sampled)] == [(7, 2), (8, 3)]
    assert node.of(seq_id, Finished) == [Finished(seq_id, "length")]


def test_the_last_chunk_is_not_told_when_the_sequence_ends_with_it():
    node = node_with()
    seq_id = node.scheduler.add(make_spec(10, mode="prefill", max_new_tokens=1), 0.0)
    node.run()
    assert node.of(seq_id, ChunkComputed) == [ChunkComputed(seq_id, 0, 8)]
    assert node.scheduler.is_quiescent()


def test_a_failure_ends_its_sequence_alone_and_leaves_no_cache():
    node = node_with(max_step_tokens=16)
    bad = node.scheduler.add(make_spec(8), 0.0)
    good = node.scheduler.add(make_spec(range(50, 55)), 0.0)
    plan = node.schedule()
    assert plan is not None
    events = node.finish(plan, failed={bad: "not a number"})
    assert Failed(bad, "not a number") in events
    assert node.scheduler.status(bad) is None
    assert node.scheduler.status(good) is SequenceStatus.DECODING
    again = node.scheduler.add(make_spec(8), 0.0)
    node.step()
    assert node.of(again, Started) == [Started(again, 0)]


def test_a_failure_takes_earlier_chunks_out_of_the_cache():
    node = node_with()
    bad = node.scheduler.add(make_spec(12), 0.0)
    node.step()
    plan = node.schedule()
    assert plan is not None
    node.finish(plan, failed={bad: "step failed"})
    again = node.scheduler.add(make_spec(12), 0.0)
    node.step()
    assert node.of(again, Started) == [Started(again, 0)]


def test_one_step_in_flight_unless_told_otherwise():
    node = node_with()
    node.scheduler.add(make_spec(20), 0.0)
    assert node.schedule() is not None
    assert node.schedule() is None


def test_a_second_step_goes_on_where_the_first_ends_and_draws_no_token_twice():
    node = node_with(max_steps_in_flight=2)
    first = node.scheduler.add(make_spec(16, max_new_tokens=2), 0.0)
    plans = [node.schedule(), node.schedule()]
    assert [shape(plan) for plan in plans] == [[(first, 0, 8, False)], [(first, 8, 8, True)]]
    assert node.schedule() is None
    for plan in plans:
        assert plan is not None
        node.finish(plan)
    one = node.schedule()
    assert shape(one) == [(first, 16, 1, True)]
    assert node.schedule() is None, "its last token is being drawn"
    assert one is not None
    node.finish(one)
    node.run()
    assert node.scheduler.is_quiescent()


def test_results_must_fit_the_plan():
    node = node_with()
    seq_id = node.scheduler.add(make_spec(3), 0.0)
    with pytest.raises(InvariantError, match="not the oldest"):
        node.scheduler.apply(StepResult(1), 0.0)
    plan = node.schedule()
    assert plan is not None
    wrong = [
        StepResult(plan.step_id),
        StepResult(plan.step_id, {seq_id: 1, 99: 1}),
        StepResult(plan.step_id, {seq_id: 1}, {99: "x"}),
        StepResult(plan.step_id + 1, {seq_id: 1}),
    ]
    for result in wrong:
        with pytest.raises(InvariantError):
            node.scheduler.apply(result, 0.0)
    node.finish(plan)
    assert node.scheduler.status(seq_id) is SequenceStatus.DECODING


def test_a_paused_prompt_keeps_its_blocks_and_gets_no_chunk():
    node = node_with()
    seq_id = node.scheduler.add(make_spec(20), 0.0)
    node.step()
    held = node.scheduler.block_table(seq_id)
    node.scheduler.pause(seq_id)
    assert node.step() is None
    assert node.scheduler.block_table(seq_id) == held
    assert not node.scheduler.work_waiting
    assert node.scheduler.load().waiting_tokens == 12
    node.scheduler.resume(seq_id)
    assert shape(node.step()) == [(seq_id, 8, 8, False)]


def test_a_pause_that_comes_after_the_last_chunk_was_sent_off_is_moot():
    node = node_with()
    seq_id = node.scheduler.add(make_spec(5), 0.0)
    plan = node.schedule()
    node.scheduler.pause(seq_id)
    assert plan is not None
    node.finish(plan)
    assert node.scheduler.status(seq_id) is SequenceStatus.DECODING
