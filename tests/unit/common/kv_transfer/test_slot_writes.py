"""What a sender does with staging slots: written, confirmed, named, credited."""

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import (
    Incarnation,
    RequestId,
    TransferKey,
)
from kvferry.common.kv_transfer.slot_writes import SlotWrites

KEY = TransferKey(RequestId("a" * 32), 1, 1, Incarnation("1" * 32), Incarnation("2" * 32))
OTHER = KEY._replace(generation=2)


@pytest.fixture
def writes():
    writes = SlotWrites()
    yield writes
    writes.check_invariants()


def test_one_piece_at_a_time_in_a_slot(writes):
    assert writes.free(KEY, (4, 7)) == 4
    writes.begin(KEY, 4, 0)
    assert writes.free(KEY, (4, 7)) == 7
    writes.begin(KEY, 7, 1)
    assert writes.free(KEY, (4, 7)) is None
    with pytest.raises(InvariantError):
        writes.begin(KEY, 4, 2)


@pytest.mark.rule(26)
def test_a_slot_is_free_again_by_the_credit_for_its_piece(writes):
    writes.begin(KEY, 4, 0)
    writes.credited(KEY, 0)  # nobody has named it yet
    assert writes.is_writing(KEY)
    writes.confirm(KEY, 4)
    assert not writes.is_writing(KEY)
    for number, key in ((1, KEY), (0, OTHER)):
        writes.credited(key, number)
        assert writes.free(KEY, (4,)) is None
    writes.credited(KEY, 0)
    assert writes.free(KEY, (4,)) == 4
    assert len(writes) == 0


def test_only_a_write_that_is_under_way_is_confirmed(writes):
    with pytest.raises(InvariantError):
        writes.confirm(KEY, 4)
    writes.begin(KEY, 4, 0)
    writes.confirm(KEY, 4)
    with pytest.raises(InvariantError):
        writes.confirm(KEY, 4)


def test_a_stop_leaves_what_is_under_way(writes):
    writes.begin(KEY, 4, 0)
    writes.begin(KEY, 7, 1)
    writes.confirm(KEY, 4)
    writes.stop(KEY)
    assert (len(writes), writes.is_writing(KEY)) == (1, True)
    writes.give_up(KEY, 7)
    assert (len(writes), writes.is_writing(KEY)) == (0, False)


def test_damage_is_seen(writes):
    writes._slots[KEY] = {}
    with pytest.raises(InvariantError):
        writes.check_invariants()
    del writes._slots[KEY]
