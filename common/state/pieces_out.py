"""Which pieces of a hand-over the transport has, and which of them its receiver asks for again. Pure.

The transport has one copy of a piece at most: with two, its blocks could be let go of when the first is read. Protocol
rule 21.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import InvariantError
from common.ids import TransferKey


@dataclass(slots=True)
class PiecesOut:
    """By transfer key: a hand-over has one after the other, and of an earlier one something may still be read."""

    _numbers: dict[TransferKey, set[int]] = field(default_factory=dict)
    _wanted: dict[TransferKey, set[int]] = field(default_factory=dict)
    """What was asked for again, and not given since."""
    _stopping: set[TransferKey] = field(default_factory=set)
    """The transport failed, and was told to stop: nothing is given to it before it has."""

    def __len__(self) -> int:
        """Pieces whose blocks may still be read."""
        return sum(len(numbers) for numbers in self._numbers.values())

    def __contains__(self, key: TransferKey) -> bool:
        return key in self._numbers

    @property
    def keys(self) -> list[TransferKey]:
        """Those that something may still be read for."""
        return list(self._numbers)

    def give(self, key: TransferKey, number: int) -> None:
        """The transport gets this piece."""
        self._numbers.setdefault(key, set()).add(number)

    def sent(self, key: TransferKey, number: int) -> bool:
        """Its blocks were read; whether it was the last one of this key. If it was asked for before, that was heard."""
        numbers = self._numbers.get(key)
        if numbers is None:
            return False
        numbers.discard(number)
        self._wanted.get(key, set()).discard(number)
        if not numbers:
            del self._numbers[key]
        return not numbers

    def fail(self, key: TransferKey) -> bool:
        """The transport cannot send what it has of this key; whether it is to be told to stop."""
        if key not in self._numbers or key in self._stopping:
            return False
        self._stopping.add(key)
        return True

    def stopped(self, key: TransferKey) -> None:
        """Nothing is read for this key any more."""
        self._numbers.pop(key, None)
        self._stopping.discard(key)

    def ask_again(self, key: TransferKey, numbers: Iterable[int]) -> None:
        """The receiver lacks these."""
        self._wanted.setdefault(key, set()).update(numbers)

    def take_wanted(self, key: TransferKey) -> set[int]:
        """What to give again now: all that was asked for and the transport does not have."""
        wanted = self._wanted.get(key)
        if wanted is None or key in self._stopping:
            return set()
        ready = wanted - self._numbers.get(key, set())
        wanted -= ready
        return ready

    def wanted(self, key: TransferKey) -> tuple[int, ...]:
        """What was asked for and waits in the transport."""
        return tuple(sorted(self._wanted.get(key, ())))

    def check_invariants(self) -> None:
        """Raises InvariantError when something is asked for that could be given."""
        for key, wanted in self._wanted.items():
            if key not in self._stopping and not wanted <= self._numbers.get(key, set()):
                raise InvariantError(f"{key}: asked for again and not given: {sorted(wanted)}")
