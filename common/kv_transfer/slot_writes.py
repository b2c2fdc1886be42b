"""The sender's bookkeeping of granted staging slots: one piece at a time per slot. Pure; performs no write.

A slot is written, the write is confirmed, then the Piece that names the slot may be sent. The Credit for that piece
frees the slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import TransferKey


class _Use(Enum):
    WRITING = auto()
    """A write is in progress: it may still change the slot and read its source."""
    NAMED = auto()
    """The write is confirmed; a Piece that is not credited yet names the slot."""


@dataclass(slots=True)
class _Slot:
    number: int
    """Number of the piece in it."""
    use: _Use


@dataclass(slots=True)
class SlotWrites:
    """Slots in use, of all hand-overs of one sender. A granted slot without an entry is free."""

    _slots: dict[TransferKey, dict[int, _Slot]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(slots) for slots in self._slots.values())

    def free(self, key: TransferKey, granted: Sequence[int]) -> int | None:
        """A granted slot that may be written now; None: a Credit must free one first."""
        in_use = self._slots.get(key, {})
        return next((slot for slot in granted if slot not in in_use), None)

    def begin(self, key: TransferKey, slot: int, number: int) -> None:
        """Start writing piece `number`. Raises InvariantError when the slot is in use."""
        slots = self._slots.setdefault(key, {})
        if slot in slots:
            raise InvariantError(f"staging slot {slot} is written while it still holds piece {slots[slot].number}")
        slots[slot] = _Slot(number, _Use.WRITING)

    def is_writing(self, key: TransferKey) -> bool:
        """Whether a write for this key is in progress."""
        return any(slot.use is _Use.WRITING for slot in self._slots.get(key, {}).values())

    def confirm(self, key: TransferKey, slot: int) -> None:
        """The write is complete: the Piece may be sent. Raises InvariantError when no write is in progress."""
        written = self._slots.get(key, {}).get(slot)
        if written is None or written.use is not _Use.WRITING:
            raise InvariantError(f"no write into staging slot {slot} is in progress")
        written.use = _Use.NAMED

    def cancel(self, key: TransferKey, slot: int) -> None:
        """The write failed and can change nothing more; its Piece is not sent."""
        self._remove(key, slot)

    def credited(self, key: TransferKey, number: int) -> None:
        """The receiver has copied or dropped this piece. No effect for a piece without a slot."""
        for slot, use in list(self._slots.get(key, {}).items()):
            if use.number == number and use.use is _Use.NAMED:
                self._remove(key, slot)

    def stop(self, key: TransferKey) -> None:
        """Write nothing more for this key: forget all its slots but those with a write in progress."""
        for slot, use in list(self._slots.get(key, {}).items()):
            if use.use is _Use.NAMED:
                self._remove(key, slot)

    def check_invariants(self) -> None:
        """Raise InvariantError when a key without slots in use has an entry."""
        if any(not slots for slots in self._slots.values()):
            raise InvariantError("a hand-over without slots in use still has an entry")

    def _remove(self, key: TransferKey, slot: int) -> None:
        slots = self._slots.get(key, {})
        slots.pop(slot, None)
        if not slots:
            self._slots.pop(key, None)
