"""Who holds which block of host memory: KV of sequences that were swapped out. Pure bookkeeping: touches no memory.

Host blocks have ids of their own and the size of the device's. A block is free or held by one holder (a seq_id); there
is nothing shared and nothing cached here.
"""

from kvferry.common.base.errors import InvariantError


class HostPool:
    """A fixed number of blocks; 0 means that nothing is ever swapped. InvariantError: an unknown or second holder."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise InvariantError(f"a host pool of {num_blocks} blocks")
        self.num_total = num_blocks
        # A stack, lowest id on top: a table taken from a fresh pool is one run of neighbours, which copies in one go.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: dict[int, tuple[int, ...]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_total - len(self._free)

    @property
    def holders(self) -> set[int]:
        """All that hold a table."""
        return set(self._tables)

    def holds(self, holder: int) -> bool:
        """Whether it holds a table."""
        return holder in self._tables

    def table(self, holder: int) -> tuple[int, ...]:
        """Its blocks, in order of position."""
        if holder not in self._tables:
            raise InvariantError(f"holder {holder} has no host blocks (released twice, or never taken)")
        return self._tables[holder]

    def take(self, holder: int, num_blocks: int) -> tuple[int, ...] | None:
        """That many blocks, all or nothing. None: there are not so many free; nothing changed then."""
        if holder in self._tables:
            raise InvariantError(f"holder {holder} has host blocks already")
        if num_blocks > len(self._free):
            return None
        table = self._tables[holder] = tuple(self._free.pop() for _ in range(num_blocks))
        return table

    def release(self, holder: int) -> None:
        """The holder lets go of all its blocks."""
        self._free.extend(reversed(self.table(holder)))
        del self._tables[holder]

    def check_invariants(self) -> None:
        """Raise InvariantError when a block is lost, or in two places."""
        held = [block for table in self._tables.values() for block in table]
        if sorted(held + self._free) != list(range(self.num_total)):
            raise InvariantError("host pool: a block is lost, or in two places")
