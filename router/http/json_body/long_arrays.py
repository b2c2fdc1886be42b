"""Cuts long arrays of scalars out of a large JSON body while it arrives, window by window. Pure; no IO, no waiting.

Why: the C decoder holds the interpreter for as long as it runs. A prompt of a million ids decoded in one call would
stall every other request of the worker for tens of milliseconds. In windows the decoder is as fast, and the caller
yields to the event loop between them.

How: outside strings, text between a `[` or `,` and a `,` or `]` that has no quote, bracket or brace is a segment of
whole array elements, in every valid body. A long segment is decoded where it is found, and one JSON string takes its
place in the rest: a random placeholder that no client can know. The rest is small and decoded as usual; if it is valid,
so was the body. Searches are `bytes.find`, which is fast where no string or bracket comes; the number of searches per
window is bounded.
"""

import os
from array import array
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec

from kvferry.common.base.errors import InvariantError
from kvferry.router.http.json_body.faults import describe_value

WINDOW_BYTES = 65_536
"""Text handled in one step: well below a millisecond of decoding."""
MIN_SEGMENT_BYTES = 4_096
"""Shorter segments stay in the rest."""
MIN_SEGMENT_ELEMENTS = 64
"""So do segments with fewer elements in their first MIN_SEGMENT_BYTES, which are mostly blanks. Errors may therefore
describe an array whose elements were cut out as one with many elements."""
_MAX_HOPS = 16
"""Brackets examined in the text between two strings before it is left as it is."""
_MAX_QUOTES_PER_STEP = 1_000
"""Quotes examined in one step: each costs about a microsecond."""
_MAX_QUOTES = 100_000
"""Quotes examined before the remaining body is left as it is."""
_ENDS = (b"]", b'"', b"[", b"{", b"}")
_ANY_ELEMENTS = msgspec.json.Decoder(list[object])


@dataclass(frozen=True, slots=True)
class Fault:
    """The first element that breaks a rule."""

    index: int
    what: str


@lru_cache(maxsize=64)
def _id_decoder(vocab_size: int) -> "msgspec.json.Decoder[list[int]]":
    return msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=vocab_size - 1)]])


class ParsedTokenIds:
    """The elements of one array, as token ids. Elements that cannot be token ids are noted, not raised: when a segment
    is decoded it is not known yet which key the array belongs to."""

    def __init__(self, vocab_size: int) -> None:
        self.ids = array("I")
        """The ids; incomplete once there is a fault."""
        self.count = 0
        """Elements seen, of any type."""
        self.not_integer: Fault | None = None
        """The first element that is not an integer."""
        self.outside: Fault | None = None
        """The first integer outside [0, vocab_size); not searched for after an element that is not an integer."""
        self._vocab_size = vocab_size
        self._decoder = _id_decoder(vocab_size)

    @property
    def faultless(self) -> bool:
        """Whether every element seen so far is an id of the vocabulary."""
        return self.not_integer is None and self.outside is None

    def feed(self, text: bytes) -> int:
        """Decode elements, given as JSON text with commas between them, and return their number.

        Raises msgspec.DecodeError.
        """
        text = b"[" + text + b"]"
        if self.faultless:
            with suppress(msgspec.ValidationError):  # Some element is not a token id: `append` finds out which one.
                ids = self._decoder.decode(text)
                self.ids.fromlist(ids)
                self.count += len(ids)
                return len(ids)
        values = _ANY_ELEMENTS.decode(text)
        self.append(values)
        return len(values)

    def append(self, values: list[object]) -> None:
        """Add decoded elements. Costs one or two passes in C unless the first fault is among them."""
        if self.not_integer is None:
            integers = [value for value in values if type(value) is int]
            if len(integers) < len(values):
                index = next(i for i, value in enumerate(values) if type(value) is not int)
                self.not_integer = Fault(self.count + index, f"must be an integer, got {describe_value(values[index])}")
            elif self.outside is None:
                self._append_integers(integers)
        self.count += len(values)

    def extend(self, other: "ParsedTokenIds") -> None:
        """Add the elements of `other`."""
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


class ArrayCutter:
    """Takes a body in windows. Afterwards `rest` is the body without its long segments, and `segments` has these."""

    def __init__(self, vocab_size: int) -> None:
        self.rest = bytearray()
        self.segments: dict[str, ParsedTokenIds] = {}
        """By the placeholder: the JSON string in `rest` that the segment was replaced by."""
        self._vocab_size = vocab_size
        self._prefix = os.urandom(16).hex()
        self._in_string = False
        self._escaped = False
        """The last window ended in a backslash that escapes the next byte."""
        self._num_quotes = 0
        self._segment: ParsedTokenIds | None = None
        self._starts_array = False
        """The current segment began at a `[`, not at a comma."""
        self._carry: list[bytes] = []
        """Text of the current segment after its last comma so far, in parts: it may be as long as the body."""

    def feed(self, window: bytes, position: int = 0) -> int:
        """Process `window`, of at most WINDOW_BYTES, from `position` on, and return the position reached.

        That is the end of the window unless it has very many strings. Raises msgspec.DecodeError.
        """
        quotes_before = self._num_quotes
        while position < len(window) and self._num_quotes - quotes_before < _MAX_QUOTES_PER_STEP:
            if self._segment is not None:
                position = self._inside_segment(self._segment, window, position)
            elif self._num_quotes > _MAX_QUOTES:
                self.rest += window[position:]
                return len(window)
            elif self._in_string:
                position = self._inside_string(window, position)
            else:
                position = self._outside(window, position)
        return position

    def finish(self) -> None:
        """End the body. Raises msgspec.DecodeError if it ends in the middle of an array."""
        if self._segment is not None:
            raise msgspec.DecodeError("the text ends inside an array")

    def check_invariants(self) -> None:
        """Raise InvariantError where the parts of the state contradict one another."""
        if self._segment is not None and self._in_string:
            raise InvariantError("inside a segment and inside a string")
        if self._carry and self._segment is None:
            raise InvariantError("text is carried for no segment")
        for ids in self.segments.values():
            ids.check_invariants()

    def _outside(self, window: bytes, position: int) -> int:
        quote = window.find(b'"', position)
        end = quote if quote >= 0 else len(window)
        start = _find_segment(window, position, end)
        if start >= 0:
            self.rest += window[position:start]
            self._segment = ParsedTokenIds(self._vocab_size)
            self._starts_array = window[start - 1] == ord("[")
            return start
        if quote < 0:
            self.rest += window[position:]
            return len(window)
        self.rest += window[position : quote + 1]
        self._in_string = True
        self._num_quotes += 1
        return quote + 1

    def _inside_string(self, window: bytes, position: int) -> int:
        start = position
        if self._escaped:
            self._escaped = False
            position += 1
        quote = window.find(b'"', position)
        end = quote if quote >= 0 else len(window)
        # An odd number of backslashes escapes the next byte.
        backslashes = end - position - len(window[position:end].rstrip(b"\\"))
        if quote < 0:
            self._escaped = backslashes % 2 == 1
            self.rest += window[start:]
            return len(window)
        self.rest += window[start : quote + 1]
        self._in_string = backslashes % 2 == 1
        self._num_quotes += 1
        return quote + 1

    def _inside_segment(self, segment: ParsedTokenIds, window: bytes, position: int) -> int:
        end = _find_end(window, position, len(window))
        if window[end : end + 1] == b"]":
            is_empty = not segment.feed(self._take_carry() + window[position:end])
            if is_empty and (segment.count or not self._starts_array):
                raise msgspec.DecodeError("a comma without an element after it")
            self._leave_segment(segment)
            return end
        comma = window.rfind(b",", position, end)
        if comma >= 0:
            if not segment.feed(self._take_carry() + window[position:comma]):
                raise msgspec.DecodeError("a comma without an element before it")
            position = comma + 1
        self._carry.append(window[position:end])
        if end < len(window):
            # The next element is not a plain scalar: it stays in the rest, with the comma before it.
            self._leave_segment(segment, (b"," if segment.count else b"") + self._take_carry())
        return end

    def _take_carry(self) -> bytes:
        carry = b"".join(self._carry)
        self._carry.clear()
        return carry

    def _leave_segment(self, segment: ParsedTokenIds, tail: bytes = b"") -> None:
        if segment.count:
            placeholder = f"{self._prefix}{len(self.segments)}"
            self.segments[placeholder] = segment
            self.rest += b'"' + placeholder.encode() + b'"'
        self.rest += tail
        self._segment = None


def _find_segment(window: bytes, position: int, end: int) -> int:
    """Where the first long segment in [position, end) begins, -1 if there is none. That range has no quote."""
    for _ in range(_MAX_HOPS):
        if end - position < MIN_SEGMENT_BYTES:
            return -1
        bracket = window.find(b"[", position, end)
        comma = window.find(b",", position, bracket if bracket >= 0 else end)
        before = comma if comma >= 0 else bracket
        if before < 0:
            return -1
        stop = _find_end(window, before + 1, end)
        dense = window.count(b",", before + 1, before + MIN_SEGMENT_BYTES) >= MIN_SEGMENT_ELEMENTS
        if dense and stop - before > MIN_SEGMENT_BYTES:
            return before + 1
        position = stop
    return -1


def _find_end(window: bytes, position: int, end: int) -> int:
    """The first quote, bracket or brace in [position, end), else `end`."""
    for byte in _ENDS:
        found = window.find(byte, position, end)
        if found >= 0:
            end = found
    return end
