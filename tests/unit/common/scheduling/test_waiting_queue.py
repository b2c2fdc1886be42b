"""WaitingQueue: classes, ageing, removal."""

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.scheduling.waiting_queue import SWEEP_MARGIN, WaitingQueue, effective_class
from tests.support.scheduling import pop


@pytest.fixture
def queue():
    queue = WaitingQueue(aging_s=10.0)
    yield queue
    queue.check_invariants()


@pytest.mark.parametrize(
    ("priority", "accepted_at", "now", "expected"),
    [(5, 0.0, 9.99, 5), (5, 0.0, 10.0, 4), (5, 0.0, 40.0, 1), (5, 0.0, 70.0, -2), (1, 5.0, 0.0, 1), (3, -20.0, 0.0, 1)],
)
def test_the_class_improves_by_one_per_aging_interval(priority, accepted_at, now, expected):
    assert effective_class(priority, accepted_at, now, 10.0) == expected


def test_order_is_class_then_age_then_arrival(queue):
    queue.push(1, 3, 2.0, 10)
    queue.push(2, 3, 1.0, 10)
    queue.push(3, 2, 3.0, 10)
    queue.push(4, 3, 1.0, 10)
    assert [pop(queue, 4.0) for _ in range(5)] == [3, 2, 4, 1, None]


def test_a_waiting_entry_overtakes_a_better_class(queue):
    queue.push(1, 2, 0.0, 1)
    queue.push(2, 1, 9.0, 1)
    assert queue.peek(9.0) == 2
    assert queue.peek(10.0) == 1, "same class by now, and older"


def test_peek_removes_nothing(queue):
    queue.push(1, 1, 0.0, 1)
    assert (queue.peek(0.0), queue.peek(0.0), len(queue)) == (1, 1, 1)


def test_removes_at_any_place_and_accepts_the_same_key_again(queue):
    for key in range(5):
        queue.push(key, 1, float(key), 10)
    queue.remove(0)
    queue.remove(2)
    queue.push(0, 1, 9.0, 5)
    assert queue.total_tokens == 35
    assert 0 in queue
    assert 2 not in queue
    assert [pop(queue, 9.0) for _ in range(4)] == [1, 3, 4, 0]
    assert (len(queue), queue.total_tokens) == (0, 0)


def test_removed_entries_do_not_accumulate(queue):
    queue.push(0, 1, 0.0, 1)
    for key in range(1, 2000):
        queue.push(key, 1, float(key), 1)
        queue.remove(key)
    assert len(queue._heaps[1]) <= SWEEP_MARGIN + 3
    assert pop(queue, 0.0) == 0


def test_invalid_calls_raise(queue):
    queue.push(1, 1, 0.0, 1)
    with pytest.raises(InvariantError):
        queue.push(1, 2, 0.0, 1)
    with pytest.raises(InvariantError):
        queue.push(2, 6, 0.0, 1)
    with pytest.raises(InvariantError):
        queue.remove(2)


def test_check_invariants_detects_damage():
    queue = WaitingQueue(1.0)
    queue.push(1, 1, 0.0, 3)
    queue._total_tokens = 2
    with pytest.raises(InvariantError, match="total"):
        queue.check_invariants()
    queue._heaps[1].clear()
    with pytest.raises(InvariantError, match="disagree"):
        queue.check_invariants()
