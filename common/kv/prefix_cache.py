"""Which block holds which prefix, and which cached block to give up first. Knows no holders.

Every published block is in the index; it is in the LRU order too while nobody holds it (evictable). All O(1) a block.
"""

from collections import OrderedDict
from typing import NamedTuple

from kvferry.common.base.errors import InvariantError


class Content(NamedTuple):
    """What a published block holds."""

    digest: bytes
    """Of everything up to and including this block."""
    parent: bytes
    """Digest of everything before it."""
    ids: bytes
    """Its own token ids, little-endian uint32."""


class PrefixCache:
    """Index of published blocks by digest, and the LRU order of those without a holder."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._content: dict[int, Content] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        """Published blocks without a holder."""
        return len(self._evictable)

    def find(self, content: Content) -> int | None:
        """The block with exactly this content: hash, ids and parent are compared."""
        block = self._block_of.get(content.digest)
        if block is None or self._content[block] != content:
            return None
        return block

    def insert(self, block: int, content: Content) -> bool:
        """Publish a held block. False: that digest is taken, and the block stays unpublished."""
        if block in self._content:
            raise InvariantError(f"block {block} is published twice")
        if content.digest in self._block_of:
            return False
        self._block_of[content.digest] = block
        self._content[block] = content
        return True

    def is_published(self, block: int) -> bool:
        """Whether its content is fixed."""
        return block in self._content

    def hold(self, block: int) -> None:
        """Its first holder came: no longer evictable."""
        del self._evictable[block]

    def release(self, block: int) -> None:
        """Its last holder left: evictable, and the last to be evicted for now."""
        self._evictable[block] = None

    def evict(self) -> int:
        """Forget the block that was let go of longest ago; it is free then."""
        block, _ = self._evictable.popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Take a published block that is not evictable out of the index."""
        del self._block_of[self._content.pop(block).digest]

    def published_blocks(self) -> set[int]:
        """All blocks in the index."""
        return set(self._content)

    def evictable_blocks(self) -> set[int]:
        """All blocks in the LRU order."""
        return set(self._evictable)

    def check_invariants(self) -> None:
        """The two directions of the index agree, and whatever is evictable is published."""
        if {content.digest: block for block, content in self._content.items()} != self._block_of:
            raise InvariantError("prefix cache: digest -> block and block -> content disagree")
        stray = self._evictable.keys() - self._content.keys()
        if stray:
            raise InvariantError(f"prefix cache: evictable but not published: {sorted(stray)}")
