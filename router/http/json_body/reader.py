"""Reads a request's body and decodes its JSON: bounded in size, in time to arrive, and in time on the event loop.

Small bodies are decoded in one call. Larger ones go through `ArrayCutter` in windows, with a turn of the event loop
after each, so one call decodes only what remains when the long arrays are cut out. That is little, unless a client
sends megabytes that the API has no use for. These are skipped in C, for up to some tenths of a second: building a
Python object for each of some million unused values would take twenty times as long.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.base.run_with_timeout import run_with_timeout
from kvferry.router.http.errors import BodyTooLargeError, BodyTooSlowError
from kvferry.router.http.exchange import Exchange
from kvferry.router.http.json_body.faults import json_fault, without_position
from kvferry.router.http.json_body.long_arrays import WINDOW_BYTES, ArrayCutter, ParsedTokenIds

LARGE_BYTES = 262_144
"""If more than this remains besides long arrays, only the keys that the API reads are decoded."""
SMALL_BYTES = 65_536
"""Within such a body, a value up to this size is decoded as it is."""
_ANYTHING = msgspec.json.Decoder(object)
_INTEGERS = msgspec.json.Decoder(list[int | str])
"""A string may be the placeholder of a segment that was cut out."""
_ONE_ELEMENT = msgspec.json.Decoder(tuple[Raw])


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A decoded body."""

    root: object
    """Plain JSON values; a string that is a key of `segments` stands for that segment of array elements."""
    vocab_size: int
    segments: dict[str, ParsedTokenIds] = field(default_factory=dict)

    def token_ids(self, values: list[object]) -> ParsedTokenIds:
        """The elements of one array of this body, with the segments that were cut out of it in their places."""
        ids = ParsedTokenIds(self.vocab_size)
        start = 0
        for place, value in enumerate(values if self.segments else ()):
            if type(value) is str and value in self.segments:
                ids.append(values[start:place])
                ids.extend(self.segments[value])
                start = place + 1
        ids.append(values[start:])
        return ids


async def read_json_body(
    exchange: Exchange, max_body_bytes: int, vocab_size: int, timeout_s: float | None = None
) -> JsonBody:
    """Read and decode the body of `exchange`.

    Raises BodyTooLargeError (nothing beyond the limit is kept, and nothing is read if Content-Length exceeds it),
    BodyTooSlowError, RequestInvalidError if the body is not JSON, ClientGoneError.
    """
    declared = exchange.content_length
    if declared is not None and declared > max_body_bytes:
        raise BodyTooLargeError(f"body: {declared} bytes, more than the limit of {max_body_bytes}")
    reader = _BodyReader(vocab_size)
    try:
        await run_with_timeout(timeout_s, reader.read(exchange, max_body_bytes))
    except TimeoutError:
        raise BodyTooSlowError(f"body: not received completely within {timeout_s:g} s") from None
    return await reader.finish()


class _BodyReader:
    """Collects chunks of any size and cuts them into windows."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._chunks: list[bytes] = []
        self._num_pending = 0
        self._cutter: ArrayCutter | None = None
        self._fault: msgspec.DecodeError | None = None

    async def read(self, exchange: Exchange, max_body_bytes: int) -> None:
        num_bytes = 0
        while (chunk := await exchange.read_chunk()) is not None:
            num_bytes += len(chunk)
            if num_bytes > max_body_bytes:
                raise BodyTooLargeError(f"body: more than the limit of {max_body_bytes} bytes")
            self._chunks.append(chunk)
            self._num_pending += len(chunk)
            if self._num_pending > WINDOW_BYTES:
                await self._cut()

    async def finish(self) -> JsonBody:
        if self._cutter is None:
            return JsonBody(decode_json(b"".join(self._chunks)), self._vocab_size)
        await self._cut()
        try:
            if self._fault is not None:
                raise self._fault
            self._cutter.finish()
        except msgspec.DecodeError as error:
            raise RequestInvalidError(f"body: not valid JSON: {without_position(str(error))}") from None
        segments = self._cutter.segments
        return JsonBody(decode_json(self._cutter.rest, is_whole=not segments), self._vocab_size, segments)

    async def _cut(self) -> None:
        text = b"".join(self._chunks)
        self._chunks.clear()
        self._num_pending = 0
        if self._fault is not None:
            return  # Keep reading: if the body is too large as well, that is the error to report.
        if self._cutter is None:
            self._cutter = ArrayCutter(self._vocab_size)
        for start in range(0, len(text), WINDOW_BYTES):
            window = text[start : start + WINDOW_BYTES]
            position = 0
            while position < len(window):
                try:
                    position = self._cutter.feed(window, position)
                except msgspec.DecodeError as error:
                    self._fault = error
                    return
                await asyncio.sleep(0)


def decode_json(text: bytes | bytearray, *, is_whole: bool = True) -> object:
    """Decode to plain JSON values. Raises RequestInvalidError: malformed, empty, not UTF-8, nested too deeply.

    `is_whole` is False if long arrays were cut out of the text.
    """
    if not text or text.isspace():
        raise RequestInvalidError("body: empty; a JSON object is expected")
    try:
        return decode_known_keys(text) if len(text) > LARGE_BYTES else _ANYTHING.decode(text)
    except UnicodeDecodeError:
        raise RequestInvalidError("body: not UTF-8") from None
    except msgspec.DecodeError as error:
        raise RequestInvalidError(f"body: not valid JSON: {json_fault(text, error, is_whole=is_whole)}") from None
    except RecursionError:
        raise RequestInvalidError("body: nested too deeply") from None


def decode_known_keys(text: bytes | bytearray) -> object:
    """Decode `text` without the keys that the API does not read; a value too large for any rule becomes OVERSIZED.

    Raises msgspec.DecodeError (malformed), UnicodeDecodeError, RecursionError.
    """
    text.decode()  # The decoder does not check the encoding of what it skips.
    return _read_body(text)


class Oversized:
    """Stands for a JSON value that is larger than any value allowed in its place."""


OVERSIZED = Oversized()
_Text = bytes | bytearray
_ReadValue = Callable[[_Text], object]


def _object(**readers: _ReadValue) -> _ReadValue:
    """Reads an object with these keys only."""
    decoder = msgspec.json.Decoder(msgspec.defstruct("Known", [(name, Raw, Raw()) for name in readers]))

    def read(text: _Text) -> object:
        if len(text) <= SMALL_BYTES:
            return _ANYTHING.decode(text)
        try:
            found = decoder.decode(text)
        except msgspec.ValidationError:  # Not an object; whether it is well-formed is only checked here.
            return _value(msgspec.json.decode(text, type=Raw))
        values = {name: getattr(found, name) for name in readers}
        return {name: readers[name](value) for name, value in values.items() if len(value)}

    return read


def _only_element(reader: _ReadValue) -> _ReadValue:
    """Reads an array with one element."""

    def read(text: _Text) -> object:
        if len(text) <= SMALL_BYTES:
            return _ANYTHING.decode(text)
        try:
            (element,) = _ONE_ELEMENT.decode(text)
        except msgspec.ValidationError:
            return _value(text)
        return [reader(element)]

    return read


def _integers(text: _Text) -> object:
    """Reads an array of integers. Long ones were cut out before, as a rule."""
    if len(text) <= SMALL_BYTES:
        return _ANYTHING.decode(text)
    try:
        return _INTEGERS.decode(text)
    except msgspec.ValidationError:
        return OVERSIZED


def _value(text: _Text) -> object:
    """Reads any value. Of the large ones only a string may be valid."""
    return _ANYTHING.decode(text) if len(text) <= SMALL_BYTES or bytes(text)[:1] == b'"' else OVERSIZED


PARAMETERS = (
    "temperature", "top_k", "top_p", "do_sample", "seed", "repetition_penalty", "max_new_tokens", "watermark",
    "details", "batch_size", "priority", "timeout",
)  # fmt: skip
"""Keys of `parameters` that are read, in the order in which they are checked."""
_read_parameters = _object(**dict.fromkeys(PARAMETERS, _value))
_read_tensor = _object(name=_value, shape=_integers, datatype=_value, data=_integers, parameters=_read_parameters)
_read_body = _object(
    id=_value,
    inputs=_only_element(_read_tensor),
    outputs=_only_element(_object(name=_value)),
    parameters=_read_parameters,
)
