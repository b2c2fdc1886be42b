"""The block pool, rule by rule. The whole against a plain model: tests/property/test_kv_block_pool_machine.py."""

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.kv.prefix_cache import Content, PrefixCache
from tests.support.scheduling import ids

SIZE = 4


@pytest.fixture
def pool():
    pool = BlockPool(8, SIZE, "m")
    yield pool
    pool.check_invariants()


def fill(pool: BlockPool, holder: int, prompt: "list[int]") -> tuple[int, ...]:
    """Acquire, compute all, publish."""
    table = pool.acquire(holder, ids(prompt), max_cached_tokens=len(prompt))
    assert table is not None
    pool.publish(holder, ids(prompt), len(prompt))
    return table.block_ids


def test_a_fresh_table_covers_the_tokens_with_neighbouring_blocks(pool):
    table = pool.acquire(1, ids(range(9)), max_cached_tokens=8)
    assert table is not None
    assert table.block_ids == (0, 1, 2)
    assert table.num_cached_tokens == 0
    assert (pool.num_total, pool.num_free, pool.num_held) == (8, 5, 3)
    assert pool.table(1) == table.block_ids


def test_acquire_is_all_or_nothing(pool):
    fill(pool, 1, list(range(20)))
    before = (pool.num_free, pool.prompt_tokens, pool.prefix_hit_tokens)
    assert pool.acquire(2, ids(range(100, 113)), max_cached_tokens=0) is None
    assert (pool.num_free, pool.prompt_tokens, pool.prefix_hit_tokens) == before
    assert not pool.holds(2)
    assert pool.acquire(2, ids(range(100, 112)), max_cached_tokens=0) is not None


def test_extra_tokens_and_keep_free_count(pool):
    assert pool.acquire(1, ids(range(8)), max_cached_tokens=0, extra_tokens=1, keep_free=6) is None
    table = pool.acquire(1, ids(range(8)), max_cached_tokens=0, extra_tokens=1, keep_free=5)
    assert table is not None
    assert len(table.block_ids) == 3


@pytest.mark.rule(5)
def test_a_published_prefix_is_shared_while_held(pool):
    first = fill(pool, 1, list(range(10)))
    second = pool.acquire(2, ids(range(12)), max_cached_tokens=11)
    assert second is not None
    assert second.num_cached_tokens == 8
    assert second.block_ids[:2] == first[:2]
    assert second.block_ids[2] not in first
    assert pool.num_held == 4
    assert (pool.prefix_hit_tokens, pool.prompt_tokens) == (8, 22)


@pytest.mark.parametrize(("max_cached", "expected"), [(-1, 0), (0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8)])
def test_hits_are_whole_blocks_within_the_limit(pool, max_cached, expected):
    fill(pool, 1, list(range(8)))
    table = pool.acquire(2, ids(range(8)), max_cached_tokens=max_cached)
    assert table is not None
    assert table.num_cached_tokens == expected


def test_a_released_prefix_is_revived_with_its_blocks(pool):
    first = fill(pool, 1, list(range(8)))
    pool.release(1)
    assert (pool.num_free, pool.num_held) == (8, 0)
    again = pool.acquire(2, ids(range(9)), max_cached_tokens=8)
    assert again is not None
    assert again.block_ids[:2] == first
    assert again.num_cached_tokens == 8


def test_reviving_cached_blocks_uses_up_free_ones(pool):
    fill(pool, 1, list(range(8)))
    pool.release(1)
    fill(pool, 2, list(range(100, 124)))  # all that is left beside the two cached blocks
    assert pool.num_free == 2
    assert pool.acquire(3, ids(range(12)), max_cached_tokens=8) is None
    assert pool.acquire(3, ids(range(8)), max_cached_tokens=8) is not None


def test_unpublished_blocks_are_free_at_once_and_not_found(pool):
    pool.acquire(1, ids(range(8)), max_cached_tokens=0)
    pool.publish(1, ids(range(8)), 5)
    pool.release(1)
    table = pool.acquire(2, ids(range(8)), max_cached_tokens=8)
    assert table is not None
    assert table.num_cached_tokens == 4


def test_the_least_recently_released_is_evicted_tail_first(pool):
    fill(pool, 1, list(range(8)))
    fill(pool, 2, list(range(100, 108)))
    pool.release(2)
    pool.release(1)
    fill(pool, 3, list(range(200, 220)))  # four free blocks and one evicted

    newer = pool.acquire(4, ids(range(8)), max_cached_tokens=8)
    assert newer is not None
    assert newer.num_cached_tokens == 8
    pool.release(4)
    older = pool.acquire(5, ids(range(100, 108)), max_cached_tokens=8)
    assert older is not None
    assert older.num_cached_tokens == 4, "the tail of the older prefix went, its head is there"


def test_equal_content_computed_twice_is_published_once(pool):
    a = pool.acquire(1, ids(range(8)), max_cached_tokens=0)
    b = pool.acquire(2, ids(range(8)), max_cached_tokens=0)
    assert a is not None
    assert b is not None
    pool.publish(1, ids(range(8)), 8)
    pool.publish(2, ids(range(8)), 8)
    pool.release(2)
    assert pool.num_free == 6
    c = pool.acquire(3, ids(range(8)), max_cached_tokens=8)
    assert c is not None
    assert c.block_ids == a.block_ids


def test_publishing_again_or_less_changes_nothing(pool):
    fill(pool, 1, list(range(8)))
    pool.publish(1, ids(range(8)), 8)
    pool.publish(1, ids(range(8)), 3)
    assert pool.num_published_tokens(1) == 8


def test_more_than_there_is_cannot_be_published(pool):
    pool.acquire(1, ids(range(8)), max_cached_tokens=0)
    with pytest.raises(InvariantError, match="more than it has"):
        pool.publish(1, ids(range(8)), 9)
    with pytest.raises(InvariantError, match="more than it has"):
        pool.publish(1, ids(range(12)), 9)


def test_other_ids_or_another_model_never_hit(pool):
    fill(pool, 1, list(range(8)))
    other = pool.acquire(2, ids([*range(4), 9, 5, 6, 7]), max_cached_tokens=8)
    assert other is not None
    assert other.num_cached_tokens == 4
    shifted = pool.acquire(3, ids(range(4, 8)), max_cached_tokens=4)
    assert shifted is not None
    assert shifted.num_cached_tokens == 0, "the same ids after another prefix are other KV"


def test_a_hash_alone_is_no_hit():
    cache = PrefixCache()
    assert cache.insert(0, Content(b"digest", b"parent", b"ids"))
    assert cache.find(Content(b"digest", b"parent", b"ids")) == 0
    assert cache.find(Content(b"digest", b"parent", b"other")) is None
    assert cache.find(Content(b"digest", b"other", b"ids")) is None
    assert not cache.insert(1, Content(b"digest", b"parent", b"other"))
    with pytest.raises(InvariantError, match="twice"):
        cache.insert(0, Content(b"digest2", b"parent", b"ids"))


def test_grow_is_all_or_nothing(pool):
    pool.acquire(1, ids(range(8)), max_cached_tokens=0)
    assert pool.grow(1, 8)
    assert len(pool.table(1)) == 2
    assert pool.grow(1, 9)
    assert len(pool.table(1)) == 3
    assert not pool.grow(1, 33)
    assert len(pool.table(1)) == 3
    assert pool.grow(1, 32)
    assert pool.num_free == 0
    assert pool.grow(1, 5), "never shrinks"
    assert len(pool.table(1)) == 8


def test_transfer_moves_the_table_and_what_is_final(pool):
    table = fill(pool, 1, list(range(8)))
    pool.transfer(1, 2)
    assert not pool.holds(1)
    assert pool.table(2) == table
    assert pool.num_published_tokens(2) == 8
    pool.acquire(3, ids([1]), max_cached_tokens=0)
    with pytest.raises(InvariantError, match="already"):
        pool.transfer(2, 3)


def test_bad_content_is_forgotten_unless_somebody_else_holds_it(pool):
    fill(pool, 1, list(range(8)))
    shared = pool.acquire(2, ids(range(4)), max_cached_tokens=4)
    assert shared is not None
    pool.distrust(1)
    pool.check_invariants()
    assert not pool.is_writable(1, 4, 8), "forgotten, but final for its holder all the same"
    pool.release(1)
    third = pool.acquire(3, ids(range(8)), max_cached_tokens=8)
    assert third is not None
    assert third.num_cached_tokens == 4


@pytest.mark.rule(5)
def test_only_a_single_holder_may_write_and_only_what_is_not_final(pool):
    pool.acquire(1, ids(range(8)), max_cached_tokens=0)
    assert pool.is_writable(1, 0, 8)
    assert not pool.is_writable(1, 4, 9), "not covered"
    pool.publish(1, ids(range(8)), 4)
    assert not pool.is_writable(1, 3, 8)
    assert pool.is_writable(1, 4, 8)
    pool.acquire(2, ids(range(8)), max_cached_tokens=8)
    assert not pool.is_writable(2, 0, 8)
    assert pool.is_writable(2, 4, 8)


def test_without_prefix_caching_nothing_is_ever_shared():
    pool = BlockPool(8, SIZE, "m", prefix_caching=False)
    fill(pool, 1, list(range(8)))
    table = pool.acquire(2, ids(range(8)), max_cached_tokens=8)
    assert table is not None
    assert table.num_cached_tokens == 0
    pool.release(1)
    assert pool.num_free == 6
    pool.check_invariants()


@pytest.mark.parametrize("call", [
    lambda pool: pool.release(1),
    lambda pool: pool.grow(1, 4),
    lambda pool: pool.table(1),
    lambda pool: pool.publish(1, ids([1]), 1),
    lambda pool: pool.transfer(1, 2),
])  # fmt: skip
def test_a_second_release_or_an_unknown_holder_raises(pool, call):
    fill(pool, 1, [1, 2, 3, 4])
    pool.release(1)
    with pytest.raises(InvariantError, match="released twice, or never acquired"):
        call(pool)


def test_a_holder_acquires_once(pool):
    fill(pool, 1, [1])
    with pytest.raises(InvariantError, match="already"):
        pool.acquire(1, ids([1]), max_cached_tokens=0)


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(InvariantError, match="needs blocks"):
        BlockPool(0, 16, "m")


def break_counts(pool):
    pool._num_holders[7] += 1


def break_free_twice(pool):
    pool._free.append(pool._free[0])


def break_leak(pool):
    pool._free.pop()


def break_held_and_free(pool):
    pool._free.append(pool.table(1)[0])


def break_index(pool):
    pool._cache._block_of.popitem()


def break_evictable(pool):
    pool._cache._evictable[7] = None


def break_published_free(pool):
    pool._cache.insert(7, Content(b"d", b"p", b"i"))


def break_shared_unpublished(pool):
    pool._cache.forget(pool.table(1)[0])


def break_block_twice(pool):
    block = pool.table(3)[0]
    pool._holdings[3].table = (block, block)
    pool._num_holders[block] += 1


def break_final_count(pool):
    pool._holdings[3].digests += [b"x", b"y"]


def break_published_not_final(pool):
    pool._holdings[1].digests.clear()


@pytest.mark.parametrize(
    "damage", [value for name, value in list(globals().items()) if name.startswith("break_")], ids=lambda f: f.__name__
)
def test_check_invariants_sees_every_kind_of_damage(damage):
    pool = BlockPool(8, SIZE, "m")
    fill(pool, 1, list(range(8)))
    fill(pool, 2, list(range(8)))
    pool.acquire(3, ids([1]), max_cached_tokens=0)
    pool.check_invariants()
    damage(pool)
    with pytest.raises(InvariantError):
        pool.check_invariants()
