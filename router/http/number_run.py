"""Token ids taken from JSON, many at a time, at the speed of the C decoder. Pure; no IO.

A long array is decoded piece by piece without knowing yet whose value it is: what would be wrong if these were token
ids is noted, and only text that is no JSON at all raises.
"""

from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec

from kvferry.common.base.errors import InvariantError
from kvferry.router.http.describe_value import describe_value

_ANYTHING = msgspec.json.Decoder(list[object])


class MalformedJsonError(ValueError):
    """The text is not JSON."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The first element that breaks a rule."""

    index: int
    what: str


@lru_cache(maxsize=64)
def id_decoder(vocab_size: int) -> "msgspec.json.Decoder[list[int]]":
    """Decodes a JSON array of integers in [0, vocab_size)."""
    return msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=vocab_size - 1)]])


class ParsedTokenIds:
    """Token ids as they are found, with the first fault of either kind."""

    def __init__(self, vocab_size: int) -> None:
        self.ids = array("I")
        """The ids; incomplete once there is a fault."""
        self.count = 0
        """Elements seen, whatever they are."""
        self.not_integer: Fault | None = None
        """The first element that is no integer."""
        self.outside: Fault | None = None
        """The first integer outside [0, vocab_size); not looked for behind an element that is no integer."""
        self._vocab_size = vocab_size
        self._decoder = id_decoder(vocab_size)

    @property
    def faultless(self) -> bool:
        """Everything seen so far is an id of the vocabulary."""
        return self.not_integer is None and self.outside is None

    def feed(self, text: bytes) -> int:
        """Take elements in, given as JSON text with commas between them, and return how many they were.

        Raises MalformedJsonError.
        """
        text = b"[" + text + b"]"
        try:
            if self.faultless:
                ids = self._decoder.decode(text)
                self.ids.fromlist(ids)
                self.count += len(ids)
                return len(ids)
        except msgspec.ValidationError:
            pass  # Some element is not what an id should be: which one is looked for below.
        except msgspec.DecodeError as error:
            raise MalformedJsonError(str(error)) from None
        try:
            values = _ANYTHING.decode(text)
        except msgspec.DecodeError as error:
            raise MalformedJsonError(str(error)) from None
        self.append(values)
        return len(values)

    def append(self, values: list[object]) -> None:
        """Take decoded elements in. Costs one or two passes in C unless the first fault is among them."""
        if self.not_integer is None:
            integers = [value for value in values if type(value) is int]
            if len(integers) < len(values):
                index = next(i for i, value in enumerate(values) if type(value) is not int)
                self.not_integer = Fault(self.count + index, f"must be an integer, got {describe_value(values[index])}")
            elif self.outside is None:
                self._append_integers(integers)
        self.count += len(values)

    def extend(self, other: "ParsedTokenIds") -> None:
        """Take in what another one has seen."""
        if self.not_integer is None and other.not_integer is not None:
            self.not_integer = Fault(self.count + other.not_integer.index, other.not_integer.what)
        if self.outside is None and other.outside is not None:
            self.outside = Fault(self.count + other.outside.index, other.outside.what)
        self.ids.extend(other.ids)
        self.count += other.count

    def check_invariants(self) -> None:
        """Raise InvariantError where ids and counts contradict one another."""
        if self.faultless and len(self.ids) != self.count:
            raise InvariantError(f"{self.count} elements without a fault, but {len(self.ids)} ids")
        for fault in (self.not_integer, self.outside):
            if fault is not None and not 0 <= fault.index < self.count:
                raise InvariantError(f"a fault at element {fault.index} of {self.count}")

    def _append_integers(self, values: list[int]) -> None:
        if not values or (min(values) >= 0 and max(values) < self._vocab_size):
            self.ids.fromlist(values)
            return
        index = next(i for i, value in enumerate(values) if not 0 <= value < self._vocab_size)
        what = f"token id {describe_value(values[index])} is outside the vocabulary [0, {self._vocab_size})"
        self.outside = Fault(self.count + index, what)
