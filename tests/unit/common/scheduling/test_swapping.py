"""Out of blocks, with host memory to go to: who goes, when blocks are free again, who returns, and what ends it."""

from collections.abc import Iterable

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.scheduling.events import Finished, Preempted, Sampled, Started
from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceStatus
from kvferry.common.scheduling.step import StepBatch
from tests.support.scheduling import FakeNode, ids, make_spec, next_token

BEST, MIDDLE, WORST = range(1000, 1007), range(70, 77), range(50, 57)


def make_node(num_blocks: int = 6, num_host_blocks: int = 8, **config: float) -> FakeNode:
    settings = {"max_running": 8, "max_step_tokens": 64, "watermark_blocks_share": 0.0, **config}
    return FakeNode(SchedulerConfig(**settings), num_blocks=num_blocks, num_host_blocks=num_host_blocks)  # type: ignore[arg-type]


def crowd(node: FakeNode, max_new_tokens: int = 14) -> tuple[int, int, int]:
    """Three sequences of 7 ids in two blocks each, 20 positions to their ends; best, middle, worst."""
    prompts = ((BEST, 1), (MIDDLE, 3), (WORST, 5))
    best, middle, worst = (
        node.scheduler.add(make_spec(prompt, max_new_tokens=max_new_tokens, priority=priority), 0.0)
        for prompt, priority in prompts
    )
    return best, middle, worst


def blocks_for_later(node: FakeNode) -> int:
    """A reservation of three blocks: nobody can take them from it."""
    reservation = node.scheduler.reserve(make_spec(range(500, 511), max_new_tokens=2), 0.0)
    assert reservation is not None
    return reservation.seq_id


def until(node: FakeNode, seq_id: int, status: SequenceStatus, now: float = 0.0) -> None:
    """Whole steps until a sequence is there."""
    for _ in range(50):
        if node.scheduler.status(seq_id) is status:
            return
        node.step(now)
    raise AssertionError(f"never {status}")


def until_copied_out(node: FakeNode, seq_id: int) -> StepBatch:
    """The step that copies the sequence out, not run yet."""
    for _ in range(50):
        plan = node.schedule()
        assert plan is not None
        if node.scheduler.status(seq_id) is SequenceStatus.SWAPPING:
            return plan
        node.finish(plan)
    raise AssertionError("never swapped out")


def tokens(node: FakeNode, seq_id: int) -> list[int]:
    return [event.token_id for event in node.of(seq_id, Sampled)]


def undisturbed(prompt: Iterable[int], count: int) -> list[int]:
    known = ids(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return list(known[-count:])


@pytest.mark.rule(36)
def test_the_worst_goes_to_the_host_and_comes_back_with_the_same_tokens():
    node = make_node()
    sequences = crowd(node)
    node.run()
    assert [event for event in node.events if isinstance(event, Preempted)] == []
    for seq_id, prompt in zip(sequences, (BEST, MIDDLE, WORST), strict=True):
        assert node.of(seq_id, Finished) == [Finished(seq_id, "length")]
        assert tokens(node, seq_id) == undisturbed(prompt, 14)
        assert len(node.of(seq_id, Started)) == 1
    assert node.scheduler.load().swaps >= 1
    assert node.scheduler.load().preemptions == 0
    assert node.scheduler.is_quiescent()
    assert node.host.num_held == 0


@pytest.mark.rule(36)
def test_its_blocks_are_free_only_when_the_step_that_copies_them_has_come_back():
    node = make_node(max_steps_in_flight=2)
    best, middle, worst = crowd(node)
    plan = until_copied_out(node, worst)
    [copies] = plan.swap_out
    assert copies.device_blocks == node.scheduler.block_table(worst)
    assert copies.host_blocks == node.host.table(worst)
    assert node.pool.num_free == 0
    assert node.schedule() is None, "nobody else is taken from while those blocks come"
    node.finish(plan)
    assert node.scheduler.status(worst) is SequenceStatus.SWAPPED
    assert node.scheduler.block_table(worst) == ()
    assert node.pool.num_free == 2
    following = node.schedule()
    assert following is not None
    assert {part.seq_id for part in following.scheduled} == {best, middle}


def test_without_room_on_the_host_it_is_given_back():
    node = make_node(num_host_blocks=1)
    _, _, worst = crowd(node)
    node.run()
    assert node.of(worst, Preempted) == [Preempted(worst)]
    assert node.scheduler.load().swaps == 0
    assert node.scheduler.load().preemptions >= 1


def test_a_step_may_hold_nothing_but_copies():
    node = make_node(num_blocks=4)
    best = node.scheduler.add(make_spec(BEST, max_new_tokens=9, priority=1), 0.0)
    worst = node.scheduler.add(make_spec(WORST, max_new_tokens=9, priority=5), 0.0)
    plan = until_copied_out(node, worst)
    assert plan.scheduled == ()
    assert node.scheduler.work_waiting
    node.finish(plan)
    node.run()
    assert tokens(node, best) == undisturbed(BEST, 9)
    assert tokens(node, worst) == undisturbed(WORST, 9)


@pytest.mark.parametrize("when", ["going", "away", "returning"])
def test_an_abort_leaves_nothing_in_any_state(when: str):
    node = make_node()
    best, middle, worst = crowd(node)
    plan = until_copied_out(node, worst)
    if when != "going":
        node.finish(plan)
        node.scheduler.check_invariants()
    if when == "returning":
        node.scheduler.abort(best)
        node.scheduler.abort(middle)
        returning = node.schedule()
        assert returning is not None
        assert [copies.seq_id for copies in returning.swap_in] == [worst]
        plan = returning
    device, host = node.scheduler.block_table(worst), node.host.num_held
    node.scheduler.abort(worst)
    node.scheduler.check_invariants()
    if when == "away":
        assert node.host.num_held == 0
        assert node.scheduler.status(worst) is None
    else:
        assert node.scheduler.block_table(worst) == device, "freed while the engine copies"
        assert node.host.num_held == host
        node.finish(plan)
        assert node.scheduler.status(worst) is None
        assert node.host.num_held == 0
    if when != "returning":
        node.scheduler.abort(best)
        node.scheduler.abort(middle)
    assert node.scheduler.is_quiescent()


@pytest.mark.rule(36)
def test_nothing_new_gets_blocks_while_something_is_swapped_out():
    node = make_node()
    best, middle, worst = crowd(node)
    until(node, worst, SequenceStatus.SWAPPED)
    node.scheduler.abort(best)
    node.scheduler.abort(middle)
    newcomer = node.scheduler.add(make_spec([3], max_new_tokens=1, priority=1), 0.0)
    waiting = make_spec([4], max_new_tokens=1, priority=1)
    assert node.scheduler.reserve(waiting, 0.0) is None
    plan = node.step()
    assert plan is not None
    assert [copies.seq_id for copies in plan.swap_in] == [worst], "first those that were here"
    assert node.scheduler.status(newcomer) is not SequenceStatus.WAITING
    assert node.scheduler.reserve(waiting, 0.0) is not None


def test_the_end_of_what_is_swapped_out_lets_newcomers_in_though_no_block_comes_free():
    node = make_node()
    waiting = make_spec([4], max_new_tokens=1)
    _, _, worst = crowd(node)
    plan = until_copied_out(node, worst)
    assert (node.pool.num_free, node.scheduler.reserve(waiting, 0.0)) == (0, None)
    node.finish(plan)
    assert (node.pool.num_free, node.scheduler.reserve(waiting, 0.0)) == (2, None)
    node.scheduler.abort(worst)
    assert node.scheduler.reserve(waiting, 0.0) is not None


def test_it_returns_only_when_all_that_decode_may_grow():
    node = make_node(num_blocks=9)
    blocker = blocks_for_later(node)
    _, middle, worst = crowd(node)
    until(node, worst, SequenceStatus.SWAPPED)
    node.step()
    node.scheduler.release(blocker)
    assert node.pool.num_free == 3, "as many as it takes, but none for it and the other two to grow"
    plan = node.step()
    assert plan is not None
    assert plan.swap_in == ()
    node.scheduler.abort(middle)
    plan = node.step()
    assert plan is not None
    assert [copies.seq_id for copies in plan.swap_in] == [worst]


def test_the_best_of_those_away_returns_first_and_nobody_overtakes_it():
    node = make_node(num_blocks=9, max_steps_in_flight=2)
    blocker = blocks_for_later(node)
    best, middle, worst = crowd(node)
    until(node, middle, SequenceStatus.SWAPPED)
    assert node.scheduler.status(worst) is SequenceStatus.SWAPPED
    second = node.scheduler.inherit_blocks(best, make_spec(range(300, 308), max_new_tokens=2), 0.0)
    assert node.scheduler.status(second) is SequenceStatus.WAITING
    node.pool.acquire(99, ids(range(12)), max_cached_tokens=0)  # three of six: enough for the worst alone
    assert node.scheduler.schedule(0.0).plan is None
    node.pool.release(99)
    plan = node.step()
    assert plan is not None
    assert [copies.seq_id for copies in plan.swap_in] == [middle]
    node.scheduler.release(blocker)
    node.run()
    assert tokens(node, worst) == undisturbed(WORST, 14)


@pytest.mark.rule(36)
def test_one_that_cannot_return_in_time_is_given_back():
    node = make_node(swap_wait_s=2.0)
    best, _, worst = crowd(node)
    until(node, worst, SequenceStatus.SWAPPED, now=10.0)
    node.step(12.0)
    assert node.scheduler.status(worst) is SequenceStatus.SWAPPED
    node.step(12.1)
    assert node.of(worst, Preempted) == [Preempted(worst)]
    assert node.scheduler.load().preemptions == 1
    assert node.host.num_held == 0
    node.run()
    assert node.of(best, Finished) != []


def test_the_best_of_all_is_not_given_back_however_long_it_waits():
    node = make_node(num_blocks=4, swap_wait_s=2.0)
    best = node.scheduler.add(make_spec(BEST, max_new_tokens=9, priority=1), 0.0)
    other = node.scheduler.add(make_spec(WORST, max_new_tokens=9, priority=5), 0.0)
    until(node, other, SequenceStatus.SWAPPED)
    node.scheduler.abort(best)
    assert node.pool.acquire(99, ids(range(8)), max_cached_tokens=0) is not None, "blocks that nobody can take"
    assert node.scheduler.schedule(50.0) == (None, [])
    assert node.scheduler.status(other) is SequenceStatus.SWAPPED
    assert not node.scheduler.work_waiting, "waiting for blocks is no stuck engine"
    assert node.scheduler.is_starved
    node.pool.release(99)
    node.run()
    assert tokens(node, other) == undisturbed(WORST, 9)


def test_the_best_of_all_takes_the_blocks_of_worse_ones_to_return():
    node = make_node(num_blocks=9)
    blocker = blocks_for_later(node)
    best, middle, worst = crowd(node)
    until(node, best, SequenceStatus.DECODING)
    node.scheduler.pin(worst)
    until(node, middle, SequenceStatus.SWAPPED)
    node.step()
    node.scheduler.unpin(worst)
    node.scheduler.abort(best)
    assert node.pool.acquire(99, ids(range(12)), max_cached_tokens=0) is not None
    going, _ = node.scheduler.schedule(0.0)
    assert going is not None
    assert [copies.seq_id for copies in going.swap_out] == [worst]
    node.scheduler.apply(node.runner.run(going), 0.0)
    coming, _ = node.scheduler.schedule(0.0)
    assert coming is not None
    assert [copies.seq_id for copies in coming.swap_in] == [middle]
    node.pool.release(99)
    node.scheduler.release(blocker)
    node.finish(coming)
    node.run()
    assert node.of(middle, Finished, Preempted) == [Finished(middle, "length")]


def test_each_in_need_counts_on_blocks_of_its_own():
    node = make_node()
    for prompt in (BEST, MIDDLE):
        node.scheduler.add(make_spec(prompt, max_new_tokens=14, priority=1), 0.0)
    short = [node.scheduler.add(make_spec([9 - n], max_new_tokens=14, priority=5), 0.0) for n in range(2)]
    plan = until_copied_out(node, short[1])
    assert [copies.seq_id for copies in plan.swap_out] == [short[1], short[0]], "one block of each, for one each"


def test_a_worse_one_does_not_take_the_free_blocks_that_the_best_waits_for():
    node = make_node(num_blocks=8, num_host_blocks=12)
    best, middle, worst = crowd(node)
    last = node.scheduler.add(make_spec(range(90, 97), max_new_tokens=14, priority=5, accepted_at=1.0), 0.0)
    node.step()
    node.scheduler.pin(worst)
    node.scheduler.pin(last)
    until(node, middle, SequenceStatus.SWAPPED)
    while node.scheduler.num_computed_tokens(worst) < 12:
        node.step()
    node.scheduler.unpin(worst)
    node.scheduler.unpin(last)
    node.scheduler.abort(best)
    assert node.pool.acquire(99, ids(range(8)), max_cached_tokens=0) is not None
    assert node.pool.num_free == 1
    going, _ = node.scheduler.schedule(0.0)
    assert going is not None
    assert [copies.seq_id for copies in going.swap_out] == [last, worst]
    assert node.pool.num_free == 1


def test_what_the_prefix_cache_still_has_is_not_copied_back():
    node = make_node()
    others = [node.scheduler.add(make_spec(prompt, max_new_tokens=14, priority=1), 0.0) for prompt in (BEST, MIDDLE)]
    worst = node.scheduler.add(make_spec(WORST[:6], max_new_tokens=14, priority=5), 0.0)
    [away] = until_copied_out(node, worst).swap_out
    assert node.scheduler.num_computed_tokens(worst) == 7, "one whole block, and a part of another"
    node.finish(node.scheduler._in_flight[0])
    for seq_id in others:
        node.scheduler.abort(seq_id)
    hits = node.scheduler.load().prefix_hit_tokens
    plan = node.schedule()
    assert plan is not None
    [back] = plan.swap_in
    assert back.host_blocks == away.host_blocks[1:]
    assert back.device_blocks == node.scheduler.block_table(worst)[1:2]
    assert node.scheduler.load().prefix_hit_tokens == hits, "a return is no prompt"
    node.finish(plan)
    node.run()
    assert tokens(node, worst) == undisturbed(WORST[:6], 14)


def test_a_new_attempt_of_one_that_is_away_starts_anew():
    node = make_node()
    _, _, worst = crowd(node)
    until(node, worst, SequenceStatus.SWAPPED)
    known = undisturbed(WORST, 3)
    again = node.scheduler.inherit_blocks(worst, make_spec(WORST, known, max_new_tokens=14, priority=5), 0.0)
    assert node.host.num_held == 0
    node.run()
    assert tokens(node, again) == undisturbed(WORST, 14)[3:]


def test_those_away_count_as_running_and_cannot_be_pinned():
    node = make_node(max_running=3)
    _, _, worst = crowd(node)
    plan = until_copied_out(node, worst)
    with pytest.raises(InvariantError, match="no blocks to pin"):
        node.scheduler.pin(worst)
    node.finish(plan)
    with pytest.raises(InvariantError, match="no blocks to pin"):
        node.scheduler.pin(worst)
    assert node.scheduler.load().running_requests == 3
    assert node.scheduler._admission.num_running == 3


def test_what_lies_on_the_host_is_not_quiet():
    node = make_node()
    assert node.scheduler.is_quiescent()
    node.host.take(99, 1)
    assert not node.scheduler.is_quiescent()


def lose_host_blocks(node: FakeNode, seq_id: int) -> None:
    node.host.release(seq_id)


def fewer_host_blocks(node: FakeNode, seq_id: int) -> None:
    node.host.release(seq_id)
    node.host.take(seq_id, 1)


def damage_host_pool(node: FakeNode, seq_id: int) -> None:
    node.host._free.pop()


def stray_host_blocks(node: FakeNode, seq_id: int) -> None:
    node.host.take(99, 1)


@pytest.mark.parametrize(
    "damage", [lose_host_blocks, fewer_host_blocks, damage_host_pool, stray_host_blocks], ids=lambda f: f.__name__
)
def test_check_invariants_sees_damage_on_the_host(damage):
    node = make_node()
    _, _, worst = crowd(node)
    until(node, worst, SequenceStatus.SWAPPED)
    damage(node, worst)
    with pytest.raises(InvariantError):
        node.scheduler.check_invariants()


@pytest.mark.parametrize("way", ["swap_out", "swap_in"])
def test_check_invariants_sees_copies_of_other_blocks_than_its_own(way: str):
    node = make_node()
    best, middle, worst = crowd(node)
    plan = until_copied_out(node, worst)
    if way == "swap_in":
        node.finish(plan)
        node.scheduler.abort(best)
        node.scheduler.abort(middle)
        returning = node.schedule()
        assert returning is not None
        plan = returning
    [copies] = getattr(plan, way)
    object.__setattr__(copies, "device_blocks", (99,))
    with pytest.raises(InvariantError, match="does not hold"):
        node.scheduler.check_invariants()
