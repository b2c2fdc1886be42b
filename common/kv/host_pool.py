"""Allocation of host blocks for the KV of swapped-out sequences. Pure bookkeeping: touches no memory.

Host blocks have their own ids and the size of device blocks. A block is free or has one holder (a seq_id); host blocks
are neither shared nor cached.
"""

from kvferry.common.base.errors import InvariantError


class HostPool:
    """A fixed number of blocks; 0 disables swapping. Raises InvariantError for an unknown or a second holder."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise InvariantError(f"host pool: {num_blocks} blocks; expected 0 or more")
        self.num_total = num_blocks
        # A stack with the lowest id on top: a new table is one run of adjacent blocks, copied in one operation.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: dict[int, tuple[int, ...]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_total - len(self._free)

    @property
    def holders(self) -> set[int]:
        return set(self._tables)

    def holds(self, holder: int) -> bool:
        return holder in self._tables

    def table(self, holder: int) -> tuple[int, ...]:
        """Block ids in order of position."""
        if holder not in self._tables:
            raise InvariantError(f"holder {holder} has no host blocks (released twice, or never allocated)")
        return self._tables[holder]

    def allocate(self, holder: int, num_blocks: int) -> tuple[int, ...] | None:
        """Allocate num_blocks, all or nothing. None, with nothing changed: too few are free."""
        if holder in self._tables:
            raise InvariantError(f"holder {holder} has host blocks already")
        if num_blocks > len(self._free):
            return None
        table = self._tables[holder] = tuple(self._free.pop() for _ in range(num_blocks))
        return table

    def release(self, holder: int) -> None:
        """Release all blocks of the holder."""
        self._free.extend(reversed(self.table(holder)))
        del self._tables[holder]

    def check_invariants(self) -> None:
        """Raise InvariantError when a block is lost or listed twice."""
        held = [block for table in self._tables.values() for block in table]
        if sorted(held + self._free) != list(range(self.num_total)):
            raise InvariantError("host pool: a block is lost or listed twice")
