"""Index of published blocks by prefix, and the eviction order of unheld ones. Pure; does not know holders.

Every published block is in the index. One without a holder is evictable and also in the LRU order. O(1) per block.
"""

from collections import OrderedDict
from typing import NamedTuple

from kvferry.common.base.errors import InvariantError


class Content(NamedTuple):
    """The content of a published block."""

    digest: bytes
    """Hash of all ids up to and including this block."""
    parent: bytes
    """Hash of all ids before this block."""
    ids: bytes
    """The block's token ids, little-endian uint32."""


class PrefixCache:
    """See the module docstring. The caller reports the first holder and the last release of each block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._content: dict[int, Content] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def find(self, content: Content) -> int | None:
        """The block with exactly this content: compares hash, ids and parent."""
        block = self._block_of.get(content.digest)
        if block is None or self._content[block] != content:
            return None
        return block

    def insert(self, block: int, content: Content) -> bool:
        """Publish a held block. False: another block has this digest, and the block stays unpublished."""
        if block in self._content:
            raise InvariantError(f"block {block} is published twice")
        if content.digest in self._block_of:
            return False
        self._block_of[content.digest] = block
        self._content[block] = content
        return True

    def is_published(self, block: int) -> bool:
        return block in self._content

    def hold(self, block: int) -> None:
        """A published block got its first holder: no longer evictable."""
        del self._evictable[block]

    def release(self, block: int) -> None:
        """A published block lost its last holder: evictable, most recently used."""
        self._evictable[block] = None

    def evict(self) -> int:
        """Remove the least recently used evictable block from the index and return it, free."""
        block, _ = self._evictable.popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Remove a published block that is not evictable from the index."""
        del self._block_of[self._content.pop(block).digest]

    def published_blocks(self) -> set[int]:
        return set(self._content)

    def evictable_blocks(self) -> set[int]:
        return set(self._evictable)

    def check_invariants(self) -> None:
        """Raise InvariantError unless both directions of the index agree and all evictable blocks are published."""
        if {content.digest: block for block, content in self._content.items()} != self._block_of:
            raise InvariantError("prefix cache: digest -> block and block -> content disagree")
        stray = self._evictable.keys() - self._content.keys()
        if stray:
            raise InvariantError(f"prefix cache: evictable but not published: {sorted(stray)}")
