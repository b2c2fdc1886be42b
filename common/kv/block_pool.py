"""Who holds which KV block, and what the prefix cache knows. Pure bookkeeping: touches no memory, no clock.

A block is free, cached (no holder, evictable), or held by one or more holders. It is written only by its single
holder, before it is published to the prefix cache. Holders are ints (seq_ids).
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from kvferry.common.base.errors import InvariantError
from kvferry.common.kv.hashing import chain_bytes, root, token_bytes
from kvferry.common.kv.prefix_cache import Content, PrefixCache

ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockTable:
    """What `acquire` gave."""

    block_ids: tuple[int, ...]
    num_cached_tokens: int
    """Positions below this have their KV already: a multiple of the block size."""


@dataclass(slots=True)
class AllocationMemo:
    """What `acquire` found out about ids that wait for room, kept by whoever asks for them, so that the next try need
    not find it out again. For one pool and for ids that do not change."""

    contents: list[Content] = field(default_factory=list)
    """Of the leading whole blocks, as far as a try has looked; let go of when there was room."""
    refused: tuple[int, ...] | None = None
    """What the last one without room asked for, and the pool's counts of what can make room."""


@dataclass(slots=True)
class _Holding:
    """What one holder has. `digests` covers the leading whole blocks that are final."""

    table: tuple[int, ...]
    digests: list[bytes] = field(default_factory=list)


class BlockPool:
    """See the module's docstring. InvariantError: an unknown holder, a double release, or numbers out of range."""

    def __init__(self, num_blocks: int, block_size: int, model_identity: str, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvariantError(f"a pool needs blocks: {num_blocks} of {block_size} tokens")
        self.num_total = num_blocks
        self.block_size = block_size
        self.prefix_hit_tokens = 0
        """Total since start, over all successful `acquire`s."""
        self.prompt_tokens = 0
        """Total since start, likewise: what was asked for."""
        self.num_releases = 0
        """Total since start. While it stands, an `acquire` that found no room finds only what is published since."""
        self._num_publications = 0
        self._caching = prefix_caching
        self._root = root(model_identity)
        self._cache = PrefixCache()
        # A stack, lowest id on top: fresh tables get runs of neighbouring blocks, which transfers merge.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._holdings: dict[int, _Holding] = {}

    # --- numbers ---

    @property
    def num_free(self) -> int:
        """Free or evictable."""
        return len(self._free) + self._cache.num_evictable

    @property
    def num_held(self) -> int:
        """Held by at least one holder."""
        return self.num_total - self.num_free

    @property
    def holders(self) -> set[int]:
        """All that hold a table."""
        return set(self._holdings)

    def is_held(self, block: int) -> bool:
        """Whether somebody holds the block."""
        return self._num_holders[block] > 0

    def holds(self, holder: int) -> bool:
        """Whether it holds a table."""
        return holder in self._holdings

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that cover num_tokens positions."""
        return -(-num_tokens // self.block_size)

    def table(self, holder: int) -> tuple[int, ...]:
        """Block ids in order of position."""
        return self._holding(holder).table

    def num_exclusive(self, holder: int) -> int:
        """How many of its blocks nobody else holds: what its release makes free."""
        return sum(1 for block in self.table(holder) if self._num_holders[block] == 1)

    def num_published_tokens(self, holder: int) -> int:
        """Leading positions of this holder that are final: never to be written again by it."""
        return len(self._holding(holder).digests) * self.block_size

    def is_writable(self, holder: int, token_start: int, token_end: int) -> bool:
        """Whether positions token_start .. token_end - 1 lie in its blocks, not final, and held by nobody else."""
        holding, size = self._holding(holder), self.block_size
        if token_start < len(holding.digests) * size or token_end > len(holding.table) * size:
            return False
        blocks = holding.table[token_start // size : self.blocks_for(token_end)]
        return all(self._num_holders[block] == 1 and not self._cache.is_published(block) for block in blocks)

    # --- taking and giving ---

    def acquire(
        self,
        holder: int,
        token_ids: "array[int]",
        *,
        max_cached_tokens: int,
        extra_tokens: int = 0,
        keep_free: int = 0,
        counted: bool = True,
        tries: AllocationMemo | None = None,
    ) -> BlockTable | None:
        """Blocks for len(token_ids) + extra_tokens positions; all or nothing.

        Leading whole blocks within max_cached_tokens that the prefix cache has are shared. None: it would leave fewer
        than keep_free blocks free; nothing changed then. `counted`: whether the totals of hits and prompts count it.
        `tries`: those before, if there may be more than one.

        A refusal stands while the same is asked for and nothing is released or published: a hit that somebody holds
        takes nothing of what is free. All else takes as many of the free as it makes hits held, or more.
        """
        if holder in self._holdings:
            raise InvariantError(f"holder {holder} has a table already")
        tries = tries or AllocationMemo()
        attempt = (max_cached_tokens, extra_tokens, keep_free, self.num_releases, self._num_publications)
        if tries.refused == attempt:
            return None
        num_blocks = self.blocks_for(len(token_ids) + extra_tokens)
        hits = self._hits_in_room(num_blocks, token_ids, max_cached_tokens, self.num_free - keep_free, tries)
        if hits is None:
            tries.refused = attempt
            return None
        for block in hits:
            self._hold(block)
        table = (*hits, *self._take(num_blocks - len(hits)))
        self._holdings[holder] = _Holding(table, [content.digest for content in tries.contents[: len(hits)]])
        tries.contents = []
        num_cached_tokens = len(hits) * self.block_size
        if counted:
            self.prefix_hit_tokens += num_cached_tokens
            self.prompt_tokens += len(token_ids)
        return BlockTable(table, num_cached_tokens)

    def num_wanted(self, token_ids: "array[int]", *, max_cached_tokens: int, extra_tokens: int = 0) -> int:
        """How many blocks of those now free an `acquire` would take."""
        hits = self._lookup(token_ids, max_cached_tokens, [])
        return self.blocks_for(len(token_ids) + extra_tokens) - self._num_held_by_others(hits)

    def grow(self, holder: int, num_tokens: int) -> bool:
        """Extend the holder's table to cover num_tokens positions; all or nothing."""
        holding = self._holding(holder)
        num_lacking = self.blocks_for(num_tokens) - len(holding.table)
        if num_lacking <= 0:
            return True
        if num_lacking > self.num_free:
            return False
        holding.table = (*holding.table, *self._take(num_lacking))
        return True

    def publish(self, holder: int, token_ids: "array[int]", num_computed_tokens: int) -> None:
        """The first num_computed_tokens positions are final: their whole blocks enter the prefix cache.

        A block whose content another block has published already stays the holder's own and leaves with it.
        """
        holding = self._holding(holder)
        first, end = len(holding.digests), num_computed_tokens // self.block_size
        if num_computed_tokens > min(len(token_ids), len(holding.table) * self.block_size):
            raise InvariantError(f"holder {holder} publishes {num_computed_tokens} tokens, more than it has")
        if not self._caching or end <= first:
            return
        self._num_publications += 1
        data = token_bytes(token_ids[first * self.block_size : end * self.block_size])
        width = self.block_size * ID_BYTES
        parent = holding.digests[-1] if holding.digests else self._root
        for number, block in enumerate(holding.table[first:end]):
            ids = data[number * width : (number + 1) * width]
            content = Content(chain_bytes(parent, ids), parent, ids)
            self._cache.insert(block, content)
            holding.digests.append(content.digest)
            parent = content.digest

    def release(self, holder: int) -> None:
        """The holder lets go of all its blocks: published ones become cached, others free.

        Tail blocks go first, so that they are evicted before the heads they hang on.
        """
        holding = self._holding(holder)
        del self._holdings[holder]
        self.num_releases += 1
        for block in reversed(holding.table):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if self._cache.is_published(block):
                self._cache.release(block)
            else:
                self._free.append(block)

    def distrust(self, holder: int) -> None:
        """Its content may be bad: the prefix cache forgets what nobody else holds; it is found by nobody from now."""
        for block in self._holding(holder).table:
            if self._num_holders[block] == 1 and self._cache.is_published(block):
                self._cache.forget(block)

    def transfer(self, holder_from: int, holder_to: int) -> None:
        """holder_to, new here, takes the table of holder_from over."""
        if holder_to in self._holdings:
            raise InvariantError(f"holder {holder_to} has a table already")
        self._holdings[holder_to] = self._holding(holder_from)
        del self._holdings[holder_from]

    # --- inside ---

    def _holding(self, holder: int) -> _Holding:
        try:
            return self._holdings[holder]
        except KeyError:
            raise InvariantError(f"holder {holder} has no blocks (released twice, or never acquired)") from None

    def _max_hits(self, token_ids: "array[int]", max_cached_tokens: int) -> int:
        if not self._caching:
            return 0
        return max(0, min(max_cached_tokens, len(token_ids))) // self.block_size

    def _hits_in_room(
        self, num_blocks: int, token_ids: "array[int]", max_cached_tokens: int, room: int, tries: AllocationMemo
    ) -> list[int] | None:
        """The cached prefix of a table of num_blocks. None: the table takes more than `room` of what is free."""
        if num_blocks - self._max_hits(token_ids, max_cached_tokens) > room:
            return None  # no number of hits can help: spares the hashing while the pool is full
        hits = self._lookup(token_ids, max_cached_tokens, tries.contents)
        return hits if num_blocks - self._num_held_by_others(hits) <= room else None

    def _lookup(self, token_ids: "array[int]", max_cached_tokens: int, known: list[Content]) -> list[int]:
        """Blocks of the longest cached prefix of whole blocks. Contents that are not known yet are added."""
        hits: list[int] = []
        num_blocks = self._max_hits(token_ids, max_cached_tokens)
        for content in chain(known[:num_blocks], self._unknown(token_ids, num_blocks, known)):
            block = self._cache.find(content)
            if block is None:
                break
            hits.append(block)
        return hits

    def _unknown(self, token_ids: "array[int]", num_blocks: int, known: list[Content]) -> Iterator[Content]:
        """Of the first num_blocks blocks those contents that are not known; each is known from then on."""
        first, width = len(known), self.block_size * ID_BYTES
        parent = known[-1].digest if known else self._root
        data = token_bytes(token_ids[first * self.block_size : num_blocks * self.block_size])
        for start in range(0, len(data), width):
            ids = data[start : start + width]
            known.append(Content(chain_bytes(parent, ids), parent, ids))
            parent = known[-1].digest
            yield known[-1]

    def _num_held_by_others(self, hits: list[int]) -> int:
        """Hits that take nothing of what is free; the rest would be revived from the evictable ones."""
        return sum(1 for block in hits if self._num_holders[block] > 0)

    def _hold(self, block: int) -> None:
        if self._num_holders[block] == 0:
            self._cache.hold(block)
        self._num_holders[block] += 1

    def _take(self, count: int) -> list[int]:
        """Blocks for writing: free ones first, then the least recently used cached ones. The caller checked room."""
        blocks = [self._free.pop() if self._free else self._cache.evict() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def check_invariants(self) -> None:
        """Raise InvariantError when counts, states, holders and the cache's index do not agree."""
        self._cache.check_invariants()
        counted = Counter(block for holding in self._holdings.values() for block in holding.table)
        if any(self._num_holders[block] != counted[block] for block in range(self.num_total)):
            raise InvariantError("block pool: counts of holders differ from the tables")
        free, held, cached = set(self._free), set(counted), self._cache.evictable_blocks()
        if len(free) != len(self._free) or free & held or free & cached or held & cached:
            raise InvariantError("block pool: a block is in two states")
        if len(free) + len(held) + len(cached) != self.num_total:
            raise InvariantError("block pool: a block is in no state")
        published = self._cache.published_blocks()
        if not cached <= published <= held | cached:
            raise InvariantError("block pool: published blocks must be held or cached")
        for holder, holding in self._holdings.items():
            self._check_holding(holder, holding, counted, published)

    def _check_holding(self, holder: int, holding: _Holding, counted: Counter[int], published: set[int]) -> None:
        if len(set(holding.table)) != len(holding.table):
            raise InvariantError(f"block pool: holder {holder} has a block twice")
        if len(holding.digests) > len(holding.table):
            raise InvariantError(f"block pool: holder {holder} has more final blocks than blocks")
        for number, block in enumerate(holding.table):
            if counted[block] > 1 and block not in published:
                raise InvariantError(f"block pool: block {block} is shared but not published")
            if number >= len(holding.digests) and block in published:
                raise InvariantError(f"block pool: block {block} of {holder} is published and may still be written")
