"""The waiting queue against a sorted list, and the promise that nobody starves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.scheduling.waiting_queue import (
    WaitingQueue,
    effective_class,
)

AGING_S = 10.0
TIMES = st.floats(0, 200, allow_nan=False)


@given(st.lists(st.tuples(st.integers(1, 5), TIMES, st.booleans()), max_size=60), st.floats(200, 400))
def test_the_order_is_that_of_a_sort(entries, now):
    queue = WaitingQueue(AGING_S)
    for key, (priority, accepted_at, _) in enumerate(entries):
        queue.push(key, priority, accepted_at, 1)
    for key, (_, _, removed) in enumerate(entries):
        if removed:
            queue.remove(key)
    expected = sorted(
        (effective_class(priority, accepted_at, now, AGING_S), accepted_at, key)
        for key, (priority, accepted_at, removed) in enumerate(entries)
        if not removed
    )
    queue.check_invariants()
    assert [queue.pop(now) for _ in expected] == [key for _, _, key in expected]
    assert queue.pop(now) is None


@pytest.mark.rule(17)
@given(st.integers(2, 5), st.integers(1, 3), st.floats(0.25, 3.0))
def test_a_flood_of_the_best_class_starves_nobody(priority, per_tick, tick_s):
    """One pop a tick, at least one new class 1 entry a tick: the old one leaves within the bound."""
    queue = WaitingQueue(AGING_S)
    queue.push(0, priority, 0.0, 1)
    # Only what was accepted before this may be served before it.
    rivals = ((priority - 1) * AGING_S / tick_s + 1) * per_tick
    now, key, popped, served_before = 0.0, 0, None, 0
    while popped != 0:
        for _ in range(per_tick):
            key += 1
            queue.push(key, 1, now, 1)
        popped = queue.pop(now)
        served_before += 1
        assert served_before <= rivals + 1
        now += tick_s
    queue.check_invariants()


@given(st.integers(1, 5), st.integers(1, 5), TIMES, TIMES, st.floats(0, 1000))
def test_whoever_came_long_enough_before_stands_before(mine, other, accepted_at, gap, waited):
    """Age beats class after (class distance) * aging_s, at whatever time one looks."""
    queue = WaitingQueue(AGING_S)
    later = accepted_at + max(0, mine - other) * AGING_S + gap + 0.001
    queue.push(1, mine, accepted_at, 1)
    queue.push(2, other, later, 1)
    assert queue.peek(later + waited) == 1
