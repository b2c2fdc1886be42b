"""What the sender does with staging slots that it was granted: one piece at a time in each. Pure.

A slot is written, the write is confirmed, then the Piece that names the slot may be sent; the Credit for that piece
makes the slot free again. Nothing here knows what a write is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import TransferKey


class _Use(Enum):
    WRITING = auto()
    """A write is under way: it may still change the slot, and read its source."""
    NAMED = auto()
    """Confirmed, and named in a Piece that was not credited yet."""


@dataclass(slots=True)
class _Slot:
    number: int
    """Of the piece that is in it."""
    use: _Use


@dataclass(slots=True)
class SlotWrites:
    """Slots in use, of all hand-overs of one sender. A slot that is not here is free for its key."""

    _slots: dict[TransferKey, dict[int, _Slot]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(slots) for slots in self._slots.values())

    def free(self, key: TransferKey, granted: Sequence[int]) -> int | None:
        """A granted slot that may be written now; None: one of them must be credited first."""
        in_use = self._slots.get(key, {})
        return next((slot for slot in granted if slot not in in_use), None)

    def begin(self, key: TransferKey, slot: int, number: int) -> None:
        """A write of this piece begins. InvariantError when the slot is in use."""
        slots = self._slots.setdefault(key, {})
        if slot in slots:
            raise InvariantError(f"staging slot {slot} is written while piece {slots[slot].number} is in it")
        slots[slot] = _Slot(number, _Use.WRITING)

    def is_writing(self, key: TransferKey) -> bool:
        """Whether a write for this key is under way."""
        return any(slot.use is _Use.WRITING for slot in self._slots.get(key, {}).values())

    def confirm(self, key: TransferKey, slot: int) -> None:
        """The write is complete: the Piece may be sent. InvariantError when none is under way."""
        written = self._slots.get(key, {}).get(slot)
        if written is None or written.use is not _Use.WRITING:
            raise InvariantError(f"no write into staging slot {slot} is under way")
        written.use = _Use.NAMED

    def give_up(self, key: TransferKey, slot: int) -> None:
        """The write can no longer change anything, and its Piece is not sent."""
        self._remove(key, slot)

    def credited(self, key: TransferKey, number: int) -> None:
        """The receiver has copied this piece, or dropped it. One that is in no slot changes nothing."""
        for slot, use in list(self._slots.get(key, {}).items()):
            if use.number == number and use.use is _Use.NAMED:
                self._remove(key, slot)

    def stop(self, key: TransferKey) -> None:
        """Nothing more is written for this key: only the writes under way are still of interest."""
        for slot, use in list(self._slots.get(key, {}).items()):
            if use.use is _Use.NAMED:
                self._remove(key, slot)

    def check_invariants(self) -> None:
        """Raises InvariantError when a key without slots in use is kept."""
        if any(not slots for slots in self._slots.values()):
            raise InvariantError("a hand-over without slots in use is kept")

    def _remove(self, key: TransferKey, slot: int) -> None:
        slots = self._slots.get(key, {})
        slots.pop(slot, None)
        if not slots:
            self._slots.pop(key, None)
