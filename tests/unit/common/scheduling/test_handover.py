"""Both ends of a hand-over: PREFILLED and what next, taking over an earlier attempt, reservations to activation."""

import pytest

from kvferry.common.base.errors import (
    InvariantError,
    ProtocolError,
)
from kvferry.common.scheduling.events import ChunkComputed, Finished, Prefilled, Sampled, Started
from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceSpec, SequenceStatus
from kvferry.common.scheduling.step import StepResult
from tests.support.scheduling import FakeNode, make_spec, next_token


def make_node(num_blocks: int = 32, **settings) -> FakeNode:
    defaults = {"max_running": 8, "max_step_tokens": 32}
    return FakeNode(SchedulerConfig(**{**defaults, **settings}), num_blocks=num_blocks)


@pytest.fixture
def node():
    return make_node()


def prefill(node: FakeNode, prompt, outputs=(), **options) -> int:
    seq_id = node.scheduler.add(make_spec(prompt, outputs, mode="prefill", **options), 0.0)
    node.run()
    assert node.scheduler.status(seq_id) is SequenceStatus.PREFILLED
    return seq_id


# --- prefill role ---


def test_prefill_stops_with_a_token_and_holds_its_blocks(node):
    seq_id = prefill(node, 6)
    token = next_token(make_spec(6).token_ids)
    assert node.of(seq_id) == [
        Started(seq_id, 0),
        ChunkComputed(seq_id, 0, 6),
        Sampled(seq_id, token, 6, 0),
        Prefilled(seq_id, 6, token, 0),
    ]
    assert len(node.scheduler.block_table(seq_id)) == 2
    assert node.scheduler.num_computed_tokens(seq_id) == 6
    node.scheduler.release(seq_id)
    assert node.scheduler.is_quiescent()


def test_a_first_token_that_ends_it_leaves_nothing_to_hand_over():
    spec = make_spec(6, mode="prefill")
    node = make_node(eos_token_ids=frozenset({next_token(spec.token_ids)}))
    seq_id = node.scheduler.add(spec, 0.0)
    node.run()
    assert node.of(seq_id, Prefilled) == []
    assert node.of(seq_id, Finished) == [Finished(seq_id, "stop")]
    assert node.scheduler.is_quiescent()


@pytest.mark.rule(19)
def test_a_replan_whose_prefix_is_cached_computes_nothing(node):
    """9 ids known, the last one an output, and the 8 before it are two cached blocks."""
    node.scheduler.release(prefill(node, 8))
    seq_id = node.scheduler.add(make_spec(8, [5], mode="prefill"), 0.0)
    plan = node.schedule()
    assert plan is None
    assert node.of(seq_id) == [Started(seq_id, 8), Prefilled(seq_id, 8, 5, 0)]
    assert node.scheduler.status(seq_id) is SequenceStatus.PREFILLED


def test_a_replan_that_goes_on_here_computes_its_last_id(node):
    node.scheduler.release(prefill(node, 8))
    seq_id = node.scheduler.add(make_spec(8, [5]), 0.0)
    plan = node.step()
    assert plan is not None
    assert [(part.start_position, list(part.token_ids)) for part in plan.scheduled] == [(8, [5])]
    assert node.of(seq_id, Sampled)[0].index == 1


def test_a_fresh_prompt_always_computes_its_last_position(node):
    node.scheduler.release(prefill(node, 9))
    seq_id = prefill(node, 9)
    assert node.of(seq_id, Started, ChunkComputed) == [Started(seq_id, 8), ChunkComputed(seq_id, 8, 9)]


# --- taking an earlier attempt's blocks over ---


def test_what_is_held_counts_to_the_token(node):
    """11 prompt ids end within a block: the prefix cache alone would give 8."""
    old = prefill(node, 11)
    table = node.scheduler.block_table(old)
    token = node.of(old, Prefilled)[0].token_id
    new = node.scheduler.inherit_blocks(old, make_spec(11, [token], mode="prefill"), 0.0)
    assert node.scheduler.status(old) is None
    assert node.scheduler.has_events
    assert node.schedule() is None
    assert node.of(new) == [Started(new, 11), Prefilled(new, 11, token, 0)]
    assert node.scheduler.block_table(new)[:3] == table[:3]
    assert not node.scheduler.has_events
    node.scheduler.release(new)
    assert node.scheduler.is_quiescent()


def test_further_known_tokens_are_computed_from_there(node):
    old = prefill(node, 11)
    new = node.scheduler.inherit_blocks(old, make_spec(11, [5, 6, 7], mode="prefill"), 0.0)
    node.run()
    assert node.of(new, Started, ChunkComputed) == [Started(new, 11), ChunkComputed(new, 11, 14)]


def test_a_final_block_is_never_written_again(node):
    """12 ids are three published blocks; the same prompt without its token must compute position 11 once more."""
    old = prefill(node, 12)
    new = node.scheduler.inherit_blocks(old, make_spec(12, mode="prefill"), 0.0)
    node.run()
    assert node.of(new, Started, ChunkComputed) == [Started(new, 8), ChunkComputed(new, 8, 12)]


def test_the_same_ids_again_compute_their_last_position_to_draw(node):
    old = prefill(node, 11)
    new = node.scheduler.inherit_blocks(old, make_spec(11, mode="prefill"), 0.0)
    node.run()
    assert node.of(new, Started, ChunkComputed) == [Started(new, 10), ChunkComputed(new, 10, 11)]
    assert node.of(new, Prefilled)[0].token_id == node.of(old, Prefilled)[0].token_id


def test_half_computed_blocks_are_taken_over_too():
    node = make_node(max_step_tokens=8)
    old = node.scheduler.add(make_spec(14, mode="prefill"), 0.0)
    node.step()
    new = node.scheduler.inherit_blocks(old, make_spec(14, mode="prefill"), 0.0)
    node.run()
    assert node.of(new, Started, ChunkComputed) == [Started(new, 8), ChunkComputed(new, 8, 14)]


@pytest.mark.parametrize("touch", ["step", "pin"])
def test_blocks_that_are_touched_stay_and_final_ones_are_shared(touch):
    node = make_node(max_step_tokens=8)
    old = node.scheduler.add(make_spec(14, mode="prefill"), 0.0)
    node.step()
    plan = node.schedule() if touch == "step" else None
    if touch == "pin":
        node.scheduler.pin(old)
    new = node.scheduler.inherit_blocks(old, make_spec(14, mode="prefill"), 0.0)
    node.scheduler.check_invariants()
    assert node.scheduler.status(old) is SequenceStatus.ENDED
    old_table, new_table = node.scheduler.block_table(old), node.scheduler.block_table(new)
    assert (new_table[:2], set(new_table[2:]) & set(old_table)) == (old_table[:2], set())
    if plan is None:
        node.scheduler.unpin(old)
    else:
        node.finish(plan)
    node.run()
    assert node.of(new, Started) == [Started(new, 8)]
    node.scheduler.release(new)
    assert node.scheduler.is_quiescent()


def test_other_ids_share_only_what_is_equal(node):
    old = prefill(node, 10)
    new = node.scheduler.inherit_blocks(old, make_spec([*range(1000, 1005), 1, 2, 3, 4], mode="prefill"), 0.0)
    node.run()
    assert node.of(new, Started) == [Started(new, 4)]


def test_without_room_for_the_rest_it_queues_and_the_blocks_become_cache():
    node = make_node(num_blocks=4)
    old = prefill(node, 6, max_new_tokens=2)
    other = prefill(node, [7, 8, 9], max_new_tokens=2)
    new = node.scheduler.inherit_blocks(old, make_spec(6, range(7), max_new_tokens=9, mode="prefill"), 0.0)
    assert node.scheduler.status(old) is None
    assert node.scheduler.status(new) is SequenceStatus.WAITING
    node.schedule()
    assert node.scheduler.status(new) is SequenceStatus.WAITING
    node.scheduler.release(other)
    node.run()
    assert node.of(new, Started) == [Started(new, 4)]


def test_beyond_max_running_it_queues():
    node = make_node(max_running=1)
    old = prefill(node, 6)
    node.scheduler.add(make_spec([7]), 0.0)
    node.step()
    new = node.scheduler.inherit_blocks(old, make_spec(6, [1], mode="prefill"), 0.0)
    assert node.scheduler.status(new) is SequenceStatus.WAITING


def test_a_waiting_attempt_is_simply_replaced(node):
    old = node.scheduler.add(make_spec(6), 0.0)
    new = node.scheduler.inherit_blocks(old, make_spec(6, [1]), 0.0)
    assert node.scheduler.status(old) is None
    node.run()
    assert node.of(old) == []
    assert node.of(new, Finished) == [Finished(new, "length")]


def test_events_not_yet_told_of_a_replaced_attempt_are_dropped(node):
    first = prefill(node, 11)
    second = node.scheduler.inherit_blocks(first, make_spec(11, [5], mode="prefill"), 0.0)
    third = node.scheduler.inherit_blocks(second, make_spec(11, [5, 6], mode="prefill"), 0.0)
    node.run()
    assert node.of(second) == []
    assert node.of(third, Started) == [Started(third, 11)]


def test_an_ended_attempt_has_nothing_to_take_over(node):
    old = node.scheduler.add(make_spec(6), 0.0)
    node.schedule()
    node.scheduler.abort(old)
    with pytest.raises(InvariantError, match="has ended"):
        node.scheduler.inherit_blocks(old, make_spec(6), 0.0)


# --- decode role ---


def reserve(node: FakeNode, spec: SequenceSpec) -> tuple[int, int]:
    reservation = node.scheduler.reserve(spec, 0.0)
    assert reservation is not None
    assert node.scheduler.status(reservation.seq_id) is SequenceStatus.RESERVED
    assert node.scheduler.block_table(reservation.seq_id) == reservation.block_table
    node.scheduler.check_invariants()
    return reservation.seq_id, reservation.first_token


def test_from_reservation_to_the_end(node):
    spec = make_spec(10, max_new_tokens=4)
    seq_id, first = reserve(node, spec)
    assert first == 0
    assert node.step() is None, "nothing is decoded before everything is there"
    node.receive(seq_id, spec, first, 10)
    node.scheduler.commit(seq_id)
    assert node.step() is None
    token = next_token(spec.token_ids)
    assert node.scheduler.activate(seq_id, token, 10, 0.0) == [Sampled(seq_id, token, 10, 0)]
    node.run()
    assert [event.index for event in node.of(seq_id, Sampled)] == [1, 2, 3]
    assert node.of(seq_id, Finished) == [Finished(seq_id, "length")]
    assert node.scheduler.is_quiescent()


@pytest.mark.rule(5)
def test_received_kv_becomes_prefix_cache_and_is_pinned_by_the_next(node):
    spec = make_spec(10)
    seq_id, first = reserve(node, spec)
    node.receive(seq_id, spec, first, 10)
    node.scheduler.activate(seq_id, next_token(spec.token_ids), 10, 0.0)
    second, first = reserve(node, make_spec(11))
    assert first == 8
    assert node.scheduler.block_table(second)[:2] == node.scheduler.block_table(seq_id)[:2]
    node.scheduler.abort(seq_id)
    assert node.pool.num_held == 3
    node.scheduler.release(second)
    assert node.scheduler.is_quiescent()


def test_all_of_a_fresh_prompt_may_be_cached(node):
    spec = make_spec(8)
    node.scheduler.release(prefill(node, 8))
    seq_id, first = reserve(node, spec)
    assert first == 8
    node.scheduler.activate(seq_id, next_token(spec.token_ids), 8, 0.0)
    node.run()
    assert node.scheduler.is_quiescent()


def test_the_last_id_of_a_replan_is_not_taken_from_the_cache(node):
    """It may be handed over as the token to go on from, and then its position is written here."""
    spec = make_spec(7, [5])
    node.scheduler.release(prefill(node, list(spec.token_ids)))
    seq_id, first = reserve(node, spec)
    assert first == 4
    node.receive(seq_id, spec, first, 7)
    assert node.scheduler.activate(seq_id, 5, 7, 0.0) == [Sampled(seq_id, 5, 7, 0)]
    node.run()
    assert [event.index for event in node.of(seq_id, Sampled)] == list(range(1, 8))


def test_a_handed_token_that_ends_it_ends_it_at_once():
    node = make_node(eos_token_ids=frozenset({3}))
    seq_id, _ = reserve(node, make_spec(10))
    assert node.scheduler.activate(seq_id, 3, 10, 0.0) == [Sampled(seq_id, 3, 10, 0), Finished(seq_id, "stop")]
    assert node.scheduler.is_quiescent()


@pytest.mark.parametrize(("outputs", "token", "num_tokens"), [
    ((), 3, 9), ((), 3, 11), ((), 3, 0), ((5,), 4, 10), ((5,), 5, 9), ((5,), 3, 12),
])  # fmt: skip
def test_a_handover_of_another_length_changes_nothing(node, outputs, token, num_tokens):
    seq_id, _ = reserve(node, make_spec(10, outputs))
    with pytest.raises(ProtocolError, match="handed over"):
        node.scheduler.activate(seq_id, token, num_tokens, 0.0)
    assert node.scheduler.status(seq_id) is SequenceStatus.RESERVED
    node.scheduler.check_invariants()


def test_a_handover_with_an_id_outside_the_vocabulary_changes_nothing():
    node = make_node(vocab_size=2000)
    seq_id, _ = reserve(node, make_spec(10))
    with pytest.raises(ProtocolError, match=r"id 2000 is outside the vocabulary \[0, 2000\)"):
        node.scheduler.activate(seq_id, 2000, 10, 0.0)
    assert node.scheduler.status(seq_id) is SequenceStatus.RESERVED
    node.scheduler.check_invariants()


def test_only_reservations_are_activated(node):
    seq_id = prefill(node, 6)
    with pytest.raises(InvariantError, match="is prefilled, not reserved, committed"):
        node.scheduler.activate(seq_id, 1, 6, 0.0)


def test_uncommitted_reservations_are_bounded_by_their_share():
    node = make_node(num_blocks=12, reserved_share=0.5)
    first, _ = reserve(node, make_spec(11))  # 3 blocks
    reserve(node, make_spec(range(50, 61)))  # 6 of 6
    spec = make_spec(range(70, 73))
    assert node.scheduler.reserve(spec, 0.0) is None
    node.scheduler.commit(first)
    assert node.scheduler.load().reserved_blocks == 3
    reserve(node, spec)


def test_a_single_reservation_may_exceed_the_share():
    node = make_node(num_blocks=12, reserved_share=0.5)
    reserve(node, make_spec(35))
    assert node.scheduler.load().reserved_blocks == 9
    assert node.scheduler.reserve(make_spec([1]), 0.0) is None


def test_a_reservation_is_all_or_nothing():
    node = make_node(num_blocks=4, reserved_share=1.0)
    reserve(node, make_spec(9))
    before = node.scheduler.load()
    assert node.scheduler.reserve(make_spec(range(50, 56)), 0.0) is None
    assert node.scheduler.load() == before


def test_what_another_publishes_makes_room_for_the_same_prompt():
    """No block comes free by that, but fewer are wanted."""
    node = make_node(num_blocks=5, reserved_share=1.0, watermark_blocks_share=0.0)
    spec, waiting = make_spec(10), make_spec(11)
    seq_id, first = reserve(node, spec)
    node.scheduler.commit(seq_id)
    assert node.scheduler.reserve(waiting, 0.0) is None  # three wanted, two free
    node.receive(seq_id, spec, first, 10)
    node.scheduler.activate(seq_id, next_token(spec.token_ids), 10, 0.0)
    assert node.pool.num_free == 2
    _, first = reserve(node, waiting)
    assert first == 8


def test_a_request_that_may_not_be_given_back_reserves_to_its_end():
    node = make_node(num_blocks=12, reserved_share=1.0)
    spec = make_spec(6, max_new_tokens=20, times_preempted=3)  # 25 positions, 7 blocks
    seq_id, _ = reserve(node, spec)
    assert len(node.scheduler.block_table(seq_id)) == 7
    assert node.scheduler.reserve(make_spec(range(50, 56), max_new_tokens=20, times_preempted=3), 0.0) is None
    reserve(node, make_spec(range(50, 56), max_new_tokens=20))


def test_a_replan_with_one_token_left_draws_it_here_though_all_is_cached(node):
    """Nothing is handed over then: who would draw the last token?"""
    first = prefill(node, 8, max_new_tokens=2)
    token = node.of(first, Sampled)[0].token_id
    node.scheduler.release(first)
    seq_id = node.scheduler.add(make_spec(8, [token], mode="prefill", max_new_tokens=2), 0.0)
    node.run()
    assert node.of(seq_id, Started) == [Started(seq_id, 8)]
    assert [event.index for event in node.of(seq_id, Sampled)] == [1]
    assert node.of(seq_id, Finished) == [Finished(seq_id, "length")]
    assert node.scheduler.is_quiescent()


def test_a_failed_sequence_whose_blocks_are_still_read_is_in_order(node):
    seq_id = node.scheduler.add(make_spec(6, mode="prefill"), 0.0)
    plan = node.scheduler.schedule(0.0).plan
    node.scheduler.pin(seq_id)
    node.scheduler.apply(StepResult(plan.step_id, failed={seq_id: "not-a-number logits"}), 0.1)
    node.scheduler.check_invariants()
    node.scheduler.unpin(seq_id)
    assert node.scheduler.is_quiescent()
