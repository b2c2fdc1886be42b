"""HostPool: allocation is all or nothing, each block has one holder and is released once."""

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.kv.host_pool import HostPool


def test_allocation_is_all_or_nothing_and_release_frees():
    pool = HostPool(5)
    assert pool.allocate(1, 3) == (0, 1, 2)
    assert pool.allocate(2, 3) is None
    assert not pool.holds(2)
    assert pool.allocate(2, 2) == (3, 4)
    assert (pool.num_free, pool.num_held, pool.holders) == (0, 5, {1, 2})
    pool.release(1)
    assert pool.allocate(3, 3) == (0, 1, 2), "a run of adjacent blocks again"
    pool.check_invariants()


def test_an_empty_pool_allocates_nothing():
    pool = HostPool(0)
    assert pool.allocate(1, 1) is None
    assert pool.num_free == 0
    pool.check_invariants()


def test_invalid_calls_raise():
    pool = HostPool(4)
    pool.allocate(1, 1)
    with pytest.raises(InvariantError, match="already"):
        pool.allocate(1, 1)
    pool.release(1)
    with pytest.raises(InvariantError, match="released twice"):
        pool.release(1)
    with pytest.raises(InvariantError, match="-1 blocks"):
        HostPool(-1)


def test_check_invariants_detects_duplicate_and_lost_blocks():
    pool = HostPool(4)
    pool.allocate(1, 2)
    pool._free.append(0)
    with pytest.raises(InvariantError):
        pool.check_invariants()
    pool = HostPool(4)
    pool._free.pop()
    with pytest.raises(InvariantError):
        pool.check_invariants()
