"""Who holds which KV block, and what the prefix cache knows. Pure bookkeeping: touches no memory, no clock.

A block is free, cached (no holder, evictable), or held by one or more holders. It is written only by its single
holder, before it is published to the prefix cache. Holders are ints (seq_ids).
"""

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockTable:
    """What `acquire` gave."""

    block_ids: tuple[int, ...]
    num_cached_tokens: int
    """Positions below this have their KV already: a multiple of the block size."""


class BlockPool:
    """See the module's docstring. InvariantError: an unknown holder, a double release, or numbers out of range."""

    def __init__(self, num_blocks: int, block_size: int, model_identity: str, *, prefix_caching: bool = True) -> None:
        ...

    num_total: int
    block_size: int

    @property
    def num_free(self) -> int:
        """Free or evictable."""
        ...

    @property
    def num_held(self) -> int:
        """Held by at least one holder."""
        ...

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that cover num_tokens positions."""
        ...

    def acquire(
        self,
        holder: int,
        token_ids: "array[int]",
        *,
        max_cached_tokens: int,
        extra_tokens: int = 0,
        keep_free: int = 0,
    ) -> BlockTable | None:
        """Blocks for len(token_ids) + extra_tokens positions; all or nothing.

        Leading whole blocks within max_cached_tokens that the prefix cache has are shared. None: it would leave fewer
        than keep_free blocks free; nothing changed then.
        """
        ...

    def grow(self, holder: int, num_tokens: int) -> bool:
        """Extend the holder's table to cover num_tokens positions; all or nothing."""
        ...

    def publish(self, holder: int, token_ids: "array[int]", num_computed_tokens: int) -> None:
        """The first num_computed_tokens positions are final: their whole blocks enter the prefix cache."""
        ...

    def release(self, holder: int, *, keep_cached: bool = True) -> None:
        """The holder lets go of all its blocks. keep_cached False: what only it held is forgotten (bad content)."""
        ...

    def transfer(self, holder_from: int, holder_to: int) -> None:
        """holder_to, new here, takes the table of holder_from over."""
        ...

    def table(self, holder: int) -> tuple[int, ...]:
        """Block ids in order of position."""
        ...

    def num_published_tokens(self, holder: int) -> int:
        """Leading positions of this holder that are final."""
        ...

    def check_invariants(self) -> None:
        """Raise InvariantError when counts, states, holders and the cache's index do not agree."""
        ...
