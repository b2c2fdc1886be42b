"""Reads a request's body and decodes its JSON: bounded in size, and never long in one go. Knows no field of any API.

Small bodies are decoded at once. Larger ones go through `RunCutter` in windows with a turn of the event loop after
each, so only what is left beside the long arrays is decoded in one call. That is as good as nothing, unless a client
sends megabytes that the API has no use for: these are skipped in C, in up to some tenths of a second.
"""

import asyncio
from dataclasses import dataclass, field

import msgspec

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.base.run_with_timeout import run_with_timeout
from kvferry.router.http.errors import BodyTooLargeError, BodyTooSlowError
from kvferry.router.http.exchange import Exchange
from kvferry.router.http.json_fault import json_fault, without_place
from kvferry.router.http.json_runs import WINDOW_BYTES, RunCutter
from kvferry.router.http.number_run import MalformedJsonError, ParsedTokenIds
from kvferry.router.http.skeleton import decode_skeleton

LARGE_BYTES = 262_144
"""What remains beside long arrays of numbers is decoded without what no rule speaks of, if it is larger than this."""
_ANYTHING = msgspec.json.Decoder(object)


@dataclass(frozen=True, slots=True)
class Document:
    """A decoded body."""

    root: object
    """Plain JSON values; a string that is a key of `runs` stands for that run of array elements."""
    vocab_size: int
    runs: dict[str, ParsedTokenIds] = field(default_factory=dict)

    def token_ids(self, values: list[object]) -> ParsedTokenIds:
        """The elements of one array of this document, with long runs in their places."""
        if len(values) == 1 and isinstance(values[0], str) and values[0] in self.runs:
            return self.runs[values[0]]
        ids = ParsedTokenIds(self.vocab_size)
        start = 0
        marks = [i for i, value in enumerate(values) if type(value) is str and value in self.runs] if self.runs else []
        for mark in marks:
            ids.append(values[start:mark])
            ids.extend(self.runs[str(values[mark])])
            start = mark + 1
        ids.append(values[start:])
        return ids


async def read_document(
    exchange: Exchange, max_body_bytes: int, vocab_size: int, timeout_s: float | None = None
) -> Document:
    """The body of `exchange`, decoded.

    Raises BodyTooLargeError (nothing beyond the limit is kept, and nothing is read at all where Content-Length tells
    it), BodyTooSlowError, RequestInvalidError where it is no JSON, ClientGoneError.
    """
    declared = exchange.content_length
    if declared is not None and declared > max_body_bytes:
        raise BodyTooLargeError(f"body: {declared} bytes, more than the limit of {max_body_bytes}")
    reader = _DocumentReader(vocab_size)
    try:
        await run_with_timeout(timeout_s, _read(exchange, reader, max_body_bytes))
    except TimeoutError:
        raise BodyTooSlowError(f"body: did not come whole within {timeout_s:g} s") from None
    return await reader.finish()


async def _read(exchange: Exchange, reader: "_DocumentReader", max_body_bytes: int) -> None:
    num_bytes = 0
    while (chunk := await exchange.read_chunk()) is not None:
        num_bytes += len(chunk)
        if num_bytes > max_body_bytes:
            raise BodyTooLargeError(f"body: more than the limit of {max_body_bytes} bytes")
        await reader.feed(chunk)


class _DocumentReader:
    """Collects chunks of any size and cuts them into windows."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._chunks: list[bytes] = []
        self._num_pending = 0
        self._cutter: RunCutter | None = None
        self._fault: MalformedJsonError | None = None

    async def feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._num_pending += len(chunk)
        if self._num_pending > WINDOW_BYTES:
            await self._cut()

    async def finish(self) -> Document:
        if self._cutter is None:
            return Document(decode_json(b"".join(self._chunks)), self._vocab_size)
        await self._cut()
        try:
            if self._fault is not None:
                raise self._fault
            self._cutter.finish()
        except MalformedJsonError as error:
            raise RequestInvalidError(f"body: not valid JSON: {without_place(str(error))}") from None
        cutter = self._cutter
        return Document(decode_json(cutter.rest, is_whole=not cutter.runs), self._vocab_size, cutter.runs)

    async def _cut(self) -> None:
        text = b"".join(self._chunks)
        self._chunks.clear()
        self._num_pending = 0
        if self._fault is not None:
            return  # Read on all the same: a body that is too large as well is told so first.
        if self._cutter is None:
            self._cutter = RunCutter(self._vocab_size)
        for start in range(0, len(text), WINDOW_BYTES):
            window = text[start : start + WINDOW_BYTES]
            position = 0
            while position < len(window):
                try:
                    position = self._cutter.feed(window, position)
                except MalformedJsonError as error:
                    self._fault = error
                    return
                await asyncio.sleep(0)


def decode_json(text: bytes | bytearray, *, is_whole: bool = True) -> object:
    """Plain JSON values. Raises RequestInvalidError: malformed, empty, not UTF-8, nested too deeply, out of range.

    `is_whole` is False for what is left of a body when its long runs were cut out.
    """
    if not text or text.isspace():
        raise RequestInvalidError("body: empty; a JSON object is expected")
    try:
        if len(text) > LARGE_BYTES:
            return decode_skeleton(text)
        return _ANYTHING.decode(text)
    except UnicodeDecodeError:
        raise RequestInvalidError("body: not UTF-8") from None
    except msgspec.DecodeError as error:
        raise RequestInvalidError(f"body: not valid JSON: {json_fault(text, error, is_whole=is_whole)}") from None
    except RecursionError:
        raise RequestInvalidError("body: nested too deeply") from None
