"""BlockPool against a simple model that keeps contents as tuples of ids and scans all blocks."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.common.kv.block_pool import AllocationMemo, BlockPool
from tests.support.scheduling import ids

SIZE = 2
NUM_BLOCKS = 10
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
"""Only two ids, so that prefixes often coincide."""


@dataclass
class Held:
    table: tuple[int, ...]
    ids: list[int]
    num_final: int


@dataclass
class Attempt:
    """Arguments of an `acquire`."""

    ids: list[int]
    extra: int
    keep_free: int
    max_cached: int
    memo: AllocationMemo = field(default_factory=AllocationMemo)


class Model:
    """Blocks are free, in `cached` (oldest first), or in a table."""

    def __init__(self) -> None:
        self.free = set(range(NUM_BLOCKS))
        self.cached: list[int] = []
        self.content: dict[int, tuple[int, ...]] = {}
        """Published blocks: all ids up to the block's end."""
        self.held: dict[int, Held] = {}

    def holders_of(self, block: int) -> int:
        return sum(block in held.table for held in self.held.values())

    def hits(self, prompt: list[int], max_cached: int) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * SIZE <= min(max_cached, len(prompt)):
            prefix = tuple(prompt[: (len(found) + 1) * SIZE])
            block = next((b for b, content in self.content.items() if content == prefix), None)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, taken: tuple[int, ...]) -> None:
        """Blocks taken for writing: all free ones first, then the oldest cached ones in order."""
        num_free = min(len(self.free), len(taken))
        assert set(taken[:num_free]) <= self.free
        assert list(taken[num_free:]) == self.cached[: len(taken) - num_free]
        self.free -= set(taken)
        for block in taken[num_free:]:
            self.cached.remove(block)
            del self.content[block]

    def release(self, table: tuple[int, ...]) -> None:
        for block in reversed(table):
            if self.holders_of(block):
                continue
            if block in self.content:
                self.cached.append(block)
            else:
                self.free.add(block)


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE, "m")
        self.model = Model()
        self.last_holder = 0
        self.waiting: list[Attempt] = []

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.held)))

    @rule(prompt=PROMPTS, extra=st.integers(0, 3), keep_free=st.integers(0, 3), max_cached=st.integers(-1, 12))
    def acquire(self, prompt, extra, keep_free, max_cached):
        attempt = Attempt(prompt, extra, keep_free, max_cached)
        if not self.acquired(attempt):
            self.waiting.append(attempt)

    @invariant()
    def retry(self):
        """A refused attempt succeeds if and only if there are enough blocks now."""
        self.waiting = [attempt for attempt in self.waiting if not self.acquired(attempt)]

    def acquired(self, attempt: Attempt) -> bool:
        self.last_holder += 1
        hits = self.model.hits(attempt.ids, attempt.max_cached)
        needed = -(-(len(attempt.ids) + attempt.extra) // SIZE)
        revived = [block for block in hits if block in self.model.cached]
        num_free = len(self.model.free) + len(self.model.cached)
        table = self.pool.acquire(
            self.last_holder,
            ids(attempt.ids),
            max_cached_tokens=attempt.max_cached,
            extra_tokens=attempt.extra,
            keep_free=attempt.keep_free,
            memo=attempt.memo,
        )
        if needed - len(hits) + len(revived) > num_free - attempt.keep_free:
            assert table is None
            return False
        assert table is not None
        assert table.num_cached_tokens == len(hits) * SIZE
        assert list(table.block_ids[: len(hits)]) == hits
        assert len(table.block_ids) == needed
        for block in revived:
            self.model.cached.remove(block)
        self.model.take(table.block_ids[len(hits) :])
        self.model.held[self.last_holder] = Held(table.block_ids, attempt.ids, len(hits))
        return True

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5))
    def grow(self, data, more):
        holder = self.pick(data)
        held = self.model.held[holder]
        wanted = held.ids + more
        lacking = max(0, -(-len(wanted) // SIZE) - len(held.table))
        fits = lacking <= len(self.model.free) + len(self.model.cached)
        assert self.pool.grow(holder, len(wanted)) == fits
        if fits:
            table = self.pool.table(holder)
            assert table[: len(held.table)] == held.table
            self.model.take(table[len(held.table) :])
            held.table, held.ids = table, wanted

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def publish(self, data):
        holder = self.pick(data)
        held = self.model.held[holder]
        num_tokens = data.draw(st.integers(0, len(held.ids)))
        self.pool.publish(holder, ids(held.ids), num_tokens)
        for number in range(held.num_final, num_tokens // SIZE):
            prefix = tuple(held.ids[: (number + 1) * SIZE])
            if prefix not in self.model.content.values():
                self.model.content[held.table[number]] = prefix
            held.num_final = number + 1

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def release(self, data):
        holder = self.pick(data)
        self.pool.release(holder)
        self.model.release(self.model.held.pop(holder).table)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def invalidate(self, data):
        holder = self.pick(data)
        self.pool.invalidate(holder)
        for block in self.model.held[holder].table:
            if self.model.holders_of(block) == 1:
                self.model.content.pop(block, None)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def transfer(self, data):
        holder = self.pick(data)
        self.last_holder += 1
        self.pool.transfer(holder, self.last_holder)
        self.model.held[self.last_holder] = self.model.held.pop(holder)

    @invariant()
    def agrees(self):
        self.pool.check_invariants()
        assert self.pool.num_free == len(self.model.free) + len(self.model.cached)
        assert self.pool.holders == set(self.model.held)
        for holder, held in self.model.held.items():
            assert self.pool.table(holder) == held.table
            assert self.pool.num_published_tokens(holder) == held.num_final * SIZE
            for position in range(len(held.table) * SIZE):
                block = held.table[position // SIZE]
                writable = position >= held.num_final * SIZE and self.model.holders_of(block) == 1
                assert self.pool.is_writable(holder, position, position + 1) == writable

    def teardown(self):
        for holder in sorted(self.model.held):
            self.pool.release(holder)
        self.pool.check_invariants()
        assert self.pool.num_free == NUM_BLOCKS


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=150, stateful_step_count=40)
