"""Memory that one process lends to others for one-sided writes: types, and the kind that has none.

Which slot is whose is decided elsewhere (`common.state.staging_slots`); here are bytes and who can reach them.
"""

from typing import Protocol

from kvferry.common.base.ids import Incarnation


class SlotMemory(Protocol):
    """The staging slots of this process, that others write into."""

    @property
    def num_slots(self) -> int:
        """How many there are."""
        ...

    def open(self) -> str:
        """Make the memory; returns where others find it, "" without slots. ConfigError when it cannot be had."""
        ...

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """The first bytes of a slot. ValueError when there are not so many."""
        ...

    def refuse(self, peer: Incarnation) -> bool:
        """Let this life never begin a write again, if none of it can be under way; whether that is so now."""
        ...

    def close(self) -> None:
        """Give the memory back. Twice does no harm."""
        ...


class SlotWriter(Protocol):
    """The staging slots of others that this process can write into."""

    def open(self, peer: Incarnation, place: str) -> None:
        """Reach a life's slots, which `place` says. Where that fails, none of its slots fits anything."""
        ...

    def fits(self, peer: Incarnation, num_bytes: int) -> bool:
        """Whether a slot of this life can be written, and is large enough."""
        ...

    def write(self, peer: Incarnation, slot: int, data: bytes | memoryview) -> None:
        """Write and wait until it is there. ValueError when the slot does not exist."""
        ...

    def close(self, peer: Incarnation) -> None:
        """Write nothing more for this life."""
        ...

    def close_all(self) -> None:
        """Write nothing more for anybody."""
        ...


class NoSlotMemory:
    """A `SlotMemory` without slots."""

    num_slots = 0

    def open(self) -> str:
        """Nothing to find."""
        return ""

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """There is none."""
        raise ValueError(f"no staging slot {slot} here")

    def refuse(self, peer: Incarnation) -> bool:
        """Nobody writes."""
        return True

    def close(self) -> None:
        """Nothing to close."""


class NoSlotWriter:
    """A `SlotWriter` that reaches nothing."""

    def open(self, peer: Incarnation, place: str) -> None:
        """It stays out of reach."""

    def fits(self, peer: Incarnation, num_bytes: int) -> bool:
        """Never."""
        return False

    def write(self, peer: Incarnation, slot: int, data: bytes | memoryview) -> None:
        """Not to be called: nothing fits."""
        raise ValueError(f"no staging slot of {peer} is in reach")

    def close(self, peer: Incarnation) -> None:
        """Nothing to close."""

    def close_all(self) -> None:
        """Nothing to close."""
