"""Allocation of KV blocks, with a prefix cache. Pure bookkeeping: touches no memory and no clock.

A block is free, cached (no holder, evictable), or held by one or more holders. Only its single holder writes it, and
only before it is published to the prefix cache. Holders are ints (seq_ids).
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
    """Result of `acquire`."""

    block_ids: tuple[int, ...]
    num_cached_tokens: int
    """Positions below it have KV: a multiple of the block size."""


@dataclass(slots=True)
class AllocationMemo:
    """Lets a repeated `acquire` skip hashing and lookups. The caller keeps one per list of ids, for one pool; the ids
    must not change."""

    contents: list[Content] = field(default_factory=list)
    """Contents of the leading whole blocks hashed so far; dropped after a successful allocation."""
    refused: tuple[int, ...] | None = None
    """Arguments of the last refused attempt, and the pool's release and publication counts at that time."""


@dataclass(slots=True)
class _Holding:
    """The blocks of one holder."""

    table: tuple[int, ...]
    digests: list[bytes] = field(default_factory=list)
    """Of the leading whole blocks that are final."""


class BlockPool:
    """See the module docstring. Raises InvariantError for an unknown holder, a double release, numbers out of range."""

    def __init__(self, num_blocks: int, block_size: int, model_identity: str, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvariantError(
                f"block pool: expected at least one block of one token, got {num_blocks} of {block_size}"
            )
        self.num_total = num_blocks
        self.block_size = block_size
        self.prefix_hit_tokens = 0
        """Cached tokens of all successful `acquire` calls since start."""
        self.prompt_tokens = 0
        """Requested tokens of all successful `acquire` calls since start."""
        self.num_releases = 0
        """Total since start. While it is unchanged, only a publication can make a refused `acquire` succeed."""
        self._num_publications = 0
        self._caching = prefix_caching
        self._root = root(model_identity)
        self._cache = PrefixCache()
        # A stack with the lowest id on top: new tables get runs of adjacent blocks, which transfers merge.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._holdings: dict[int, _Holding] = {}

    # --- queries ---

    @property
    def num_free(self) -> int:
        """Number of free or evictable blocks."""
        return len(self._free) + self._cache.num_evictable

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one holder."""
        return self.num_total - self.num_free

    @property
    def holders(self) -> set[int]:
        return set(self._holdings)

    def is_held(self, block: int) -> bool:
        """Whether the block has a holder."""
        return self._num_holders[block] > 0

    def holds(self, holder: int) -> bool:
        return holder in self._holdings

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks needed for num_tokens positions."""
        return -(-num_tokens // self.block_size)

    def table(self, holder: int) -> tuple[int, ...]:
        """Block ids in order of position."""
        return self._holding(holder).table

    def num_exclusive(self, holder: int) -> int:
        """Number of its blocks without another holder: its release makes them free or evictable."""
        return sum(1 for block in self.table(holder) if self._num_holders[block] == 1)

    def num_published_tokens(self, holder: int) -> int:
        """Number of leading positions of this holder that are final: it must not write them again."""
        return len(self._holding(holder).digests) * self.block_size

    def is_writable(self, holder: int, token_start: int, token_end: int) -> bool:
        """Whether positions token_start .. token_end - 1 lie in its blocks, are not final, and have no other holder."""
        holding, size = self._holding(holder), self.block_size
        if token_start < len(holding.digests) * size or token_end > len(holding.table) * size:
            return False
        blocks = holding.table[token_start // size : self.blocks_for(token_end)]
        return all(self._num_holders[block] == 1 and not self._cache.is_published(block) for block in blocks)

    # --- allocation ---

    def acquire(
        self,
        holder: int,
        token_ids: "array[int]",
        *,
        max_cached_tokens: int,
        extra_tokens: int = 0,
        keep_free: int = 0,
        update_stats: bool = True,
        memo: AllocationMemo | None = None,
    ) -> BlockTable | None:
        """Allocate blocks for len(token_ids) + extra_tokens positions, all or nothing.

        Leading whole blocks within max_cached_tokens that are in the prefix cache are shared. None, with nothing
        changed: fewer than keep_free blocks would stay free. `update_stats`: include it in prefix_hit_tokens and
        prompt_tokens. `memo`: pass the same one to repeated attempts.
        """
        # A refusal holds until a release or publication: a hit that is held takes no free block, and every other
        # allocation takes at least as many free blocks as it turns evictable hits into held ones.
        if holder in self._holdings:
            raise InvariantError(f"holder {holder} has a table already")
        memo = memo or AllocationMemo()
        attempt = (max_cached_tokens, extra_tokens, keep_free, self.num_releases, self._num_publications)
        if memo.refused == attempt:
            return None
        num_blocks = self.blocks_for(len(token_ids) + extra_tokens)
        hits = self._affordable_hits(num_blocks, token_ids, max_cached_tokens, self.num_free - keep_free, memo)
        if hits is None:
            memo.refused = attempt
            return None
        for block in hits:
            self._hold(block)
        table = (*hits, *self._take(num_blocks - len(hits)))
        self._holdings[holder] = _Holding(table, [content.digest for content in memo.contents[: len(hits)]])
        memo.contents = []
        num_cached_tokens = len(hits) * self.block_size
        if update_stats:
            self.prefix_hit_tokens += num_cached_tokens
            self.prompt_tokens += len(token_ids)
        return BlockTable(table, num_cached_tokens)

    def num_needed(self, token_ids: "array[int]", *, max_cached_tokens: int, extra_tokens: int = 0) -> int:
        """Number of free or evictable blocks that an `acquire` would take."""
        hits = self._lookup(token_ids, max_cached_tokens, [])
        return self.blocks_for(len(token_ids) + extra_tokens) - self._num_held(hits)

    def grow(self, holder: int, num_tokens: int) -> bool:
        """Extend the holder's table to num_tokens positions, all or nothing. False: too few blocks are free."""
        holding = self._holding(holder)
        num_lacking = self.blocks_for(num_tokens) - len(holding.table)
        if num_lacking <= 0:
            return True
        if num_lacking > self.num_free:
            return False
        holding.table = (*holding.table, *self._take(num_lacking))
        return True

    def publish(self, holder: int, token_ids: "array[int]", num_computed_tokens: int) -> None:
        """Make the first num_computed_tokens positions final: their whole blocks enter the prefix cache.

        A block whose content is published already by another block stays private and is freed on release.
        """
        holding = self._holding(holder)
        first, end = len(holding.digests), num_computed_tokens // self.block_size
        if num_computed_tokens > min(len(token_ids), len(holding.table) * self.block_size):
            raise InvariantError(f"holder {holder} publishes {num_computed_tokens} tokens, but has fewer")
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
        """Release all blocks of the holder: published ones become evictable, others free.

        The tail is released first, so that it is evicted before the prefix that it depends on.
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

    def invalidate(self, holder: int) -> None:
        """Its content may be wrong: remove its blocks without another holder from the prefix cache."""
        for block in self._holding(holder).table:
            if self._num_holders[block] == 1 and self._cache.is_published(block):
                self._cache.forget(block)

    def transfer(self, holder_from: int, holder_to: int) -> None:
        """Move the table of holder_from to holder_to, which must have none."""
        if holder_to in self._holdings:
            raise InvariantError(f"holder {holder_to} has a table already")
        self._holdings[holder_to] = self._holding(holder_from)
        del self._holdings[holder_from]

    # --- internal ---

    def _holding(self, holder: int) -> _Holding:
        try:
            return self._holdings[holder]
        except KeyError:
            raise InvariantError(f"holder {holder} has no blocks (released twice, or never acquired)") from None

    def _max_hits(self, token_ids: "array[int]", max_cached_tokens: int) -> int:
        if not self._caching:
            return 0
        return max(0, min(max_cached_tokens, len(token_ids))) // self.block_size

    def _affordable_hits(
        self, num_blocks: int, token_ids: "array[int]", max_cached_tokens: int, limit: int, memo: AllocationMemo
    ) -> list[int] | None:
        """The cached prefix of a table of num_blocks. None: the table takes more than `limit` free blocks."""
        if num_blocks - self._max_hits(token_ids, max_cached_tokens) > limit:
            return None  # even the maximum of hits does not suffice: avoids hashing while the pool is full
        hits = self._lookup(token_ids, max_cached_tokens, memo.contents)
        return hits if num_blocks - self._num_held(hits) <= limit else None

    def _lookup(self, token_ids: "array[int]", max_cached_tokens: int, known: list[Content]) -> list[int]:
        """Blocks of the longest cached prefix. Appends newly hashed contents to `known`."""
        hits: list[int] = []
        num_blocks = self._max_hits(token_ids, max_cached_tokens)
        for content in chain(known[:num_blocks], self._unknown(token_ids, num_blocks, known)):
            block = self._cache.find(content)
            if block is None:
                break
            hits.append(block)
        return hits

    def _unknown(self, token_ids: "array[int]", num_blocks: int, known: list[Content]) -> Iterator[Content]:
        """Hash those of the first num_blocks blocks that `known` lacks, one by one, appending each to `known`."""
        first, width = len(known), self.block_size * ID_BYTES
        parent = known[-1].digest if known else self._root
        data = token_bytes(token_ids[first * self.block_size : num_blocks * self.block_size])
        for start in range(0, len(data), width):
            ids = data[start : start + width]
            known.append(Content(chain_bytes(parent, ids), parent, ids))
            parent = known[-1].digest
            yield known[-1]

    def _num_held(self, hits: list[int]) -> int:
        """Number of hits with a holder: they take no free block; the rest are evictable and count as free."""
        return sum(1 for block in hits if self._num_holders[block] > 0)

    def _hold(self, block: int) -> None:
        if self._num_holders[block] == 0:
            self._cache.hold(block)
        self._num_holders[block] += 1

    def _take(self, count: int) -> list[int]:
        """Take writable blocks: free ones first, then least recently used cached ones. The caller checks num_free."""
        blocks = [self._free.pop() if self._free else self._cache.evict() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def check_invariants(self) -> None:
        """Raise InvariantError when counts, states, holders and the cache's index disagree."""
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
