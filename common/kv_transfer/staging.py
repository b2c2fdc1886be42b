"""Staging slots: memory of a receiver that peers write into directly. Types, and implementations without slots.

`decode_node.staging_slots` assigns the slots to hand-overs; these types only move bytes and control access.
"""

from typing import Protocol

from kvferry.common.base.ids import Incarnation


class SlotMemory(Protocol):
    """The staging slots of this process, written by peers. The receiver's end of a one-sided transport."""

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        ...

    def open(self) -> str:
        """Allocate the memory and return its address for peers, "" without slots. Raises ConfigError on failure."""
        ...

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """The first num_bytes of a slot. Raises ValueError when the slot does not exist or is smaller."""
        ...

    def refuse(self, peer: Incarnation) -> bool:
        """Fence this incarnation off. True: it has no write in progress and can never start one again."""
        ...

    def close(self) -> None:
        """Release the memory. Idempotent."""
        ...


class SlotWriter(Protocol):
    """Writes into the staging slots of peers. The sender's end of a one-sided transport."""

    def open(self, peer: Incarnation, address: str) -> None:
        """Map a peer's slots. On failure `fits` is False for it, and its pieces go in messages."""
        ...

    def fits(self, peer: Incarnation, num_bytes: int) -> bool:
        """Whether the peer's slots are mapped and large enough."""
        ...

    def write(self, peer: Incarnation, slot: int, data: bytes | memoryview) -> None:
        """Write and wait for completion. Raises ValueError when the slot does not exist or is smaller."""
        ...

    def close(self, peer: Incarnation) -> None:
        """Write nothing more to this peer."""
        ...

    def close_all(self) -> None:
        """Write nothing more to any peer."""
        ...


class NoSlotMemory:
    """A `SlotMemory` without slots."""

    num_slots = 0

    def open(self) -> str:
        return ""

    def view(self, slot: int, num_bytes: int) -> memoryview:
        raise ValueError(f"staging slot {slot}: this process has no staging slots")

    def refuse(self, peer: Incarnation) -> bool:
        return True

    def close(self) -> None:
        """Do nothing."""


class NoSlotWriter:
    """A `SlotWriter` that maps nothing."""

    def open(self, peer: Incarnation, address: str) -> None:
        """Do nothing."""

    def fits(self, peer: Incarnation, num_bytes: int) -> bool:
        return False

    def write(self, peer: Incarnation, slot: int, data: bytes | memoryview) -> None:
        raise ValueError(f"staging slots of {peer} are not mapped")

    def close(self, peer: Incarnation) -> None:
        """Do nothing."""

    def close_all(self) -> None:
        """Do nothing."""
