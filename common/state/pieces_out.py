"""Which pieces of a hand-over the transport has, and which of them its receiver asked for again. Pure.

The transport has one copy of a piece at most: with two, its blocks could be let go of when the first is read. Protocol
rules 21 and 25.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.common.errors import InvariantError
from kvferry.common.ids import TransferKey


@dataclass(slots=True)
class _Pieces:
    """Those of one transfer key, by their numbers."""

    out: set[int] = field(default_factory=set)
    """The transport has them."""
    wanted: set[int] = field(default_factory=set)
    """Asked for again, and not sent since."""
    again: set[int] = field(default_factory=set)
    """Given a second time. There is no third."""
    stopping: bool = False
    """The transport failed, and was told to stop: nothing is given to it before it has."""


@dataclass(slots=True)
class PiecesOut:
    """By transfer key: a hand-over has one after the other, and of an earlier one something may still be read."""

    _by_key: dict[TransferKey, _Pieces] = field(default_factory=dict)

    def __len__(self) -> int:
        """Pieces whose blocks may still be read."""
        return sum(len(pieces.out) for pieces in self._by_key.values())

    def __contains__(self, key: TransferKey) -> bool:
        return bool(self._of(key).out)

    @property
    def keys(self) -> list[TransferKey]:
        """Those that something may still be read for."""
        return [key for key, pieces in self._by_key.items() if pieces.out]

    def give(self, key: TransferKey, number: int) -> None:
        """The transport gets this piece."""
        pieces = self._of(key)
        pieces.out.add(number)
        if number in pieces.wanted:
            pieces.again.add(number)

    def sent(self, key: TransferKey, number: int) -> bool:
        """Its blocks were read; whether it was the last one of this key. If it was asked for before, that was heard."""
        pieces = self._of(key)
        if not pieces.out:
            return False
        pieces.out.discard(number)
        pieces.wanted.discard(number)
        return not pieces.out

    def fail(self, key: TransferKey) -> bool:
        """The transport cannot send what it has of this key; whether it is to be told to stop."""
        pieces = self._of(key)
        if not pieces.out or pieces.stopping:
            return False
        pieces.stopping = True
        return True

    def stopped(self, key: TransferKey) -> None:
        """Nothing is read for this key any more."""
        pieces = self._of(key)
        pieces.out.clear()
        pieces.wanted -= pieces.again
        pieces.stopping = False

    def ask_again(self, key: TransferKey, numbers: Iterable[int]) -> None:
        """The receiver lacks these."""
        pieces = self._of(key)
        pieces.wanted.update(number for number in numbers if number in pieces.out or number not in pieces.again)

    def ready(self, key: TransferKey) -> set[int]:
        """What to give again now: all that was asked for and the transport does not have."""
        pieces = self._of(key)
        return set() if pieces.stopping else pieces.wanted - pieces.out

    def waiting(self, key: TransferKey) -> tuple[int, ...]:
        """What was asked for and is with the transport."""
        pieces = self._of(key)
        return tuple(sorted(pieces.wanted & pieces.out))

    def check_invariants(self) -> None:
        """Raises InvariantError when a piece could be given a third time."""
        for key, pieces in self._by_key.items():
            if third := (pieces.wanted & pieces.again) - pieces.out:
                raise InvariantError(f"{key}: pieces {sorted(third)} were given twice and are wanted still")

    def _of(self, key: TransferKey) -> _Pieces:
        return self._by_key.setdefault(key, _Pieces())
