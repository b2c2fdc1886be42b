"""A small HTTP/1.1 client on asyncio streams: one keep-alive connection, unary answers and server-sent events.

Light, so that thousands of requests a second can be asked for, and exact: it distinguishes a connection that was closed
before a request from one that broke off in the middle of an answer.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

_BROKEN = (ConnectionError, asyncio.IncompleteReadError)


class BrokenOffError(Exception):
    """The connection ended before the answer did. `began`: whether any of the answer came."""

    def __init__(self, *, began: bool) -> None:
        super().__init__("in the middle of an answer" if began else "before an answer")
        self.began = began


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers (names in lower case)."""

    status: int
    headers: dict[str, str]


class Connection:
    """One connection; `requests` counts what was asked on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._head: Head | None = None
        self.requests = 0

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """ConnectionError when no process listens."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    @property
    def port(self) -> int:
        """This end."""
        port: int = self._writer.get_extra_info("sockname")[1]
        return port

    @property
    def can_continue(self) -> bool:
        """Whether another request may be sent on it."""
        last = self._head
        kept = last is None or last.headers.get("connection", "").lower() != "close"
        return kept and not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        """Leave, whatever is under way."""
        self._writer.transport.abort()

    async def ask(self, path: str, body: bytes | None, *, streamed: bool = False) -> Head:
        """Send a request and read the answer's head. BrokenOffError(began=False) when none comes."""
        self.requests += 1
        accept = "Accept: text/event-stream\r\n" if streamed else ""
        verb = "GET" if body is None else "POST"
        head = f"{verb} {path} HTTP/1.1\r\nHost: x\r\n{accept}Content-Length: {len(body or b'')}\r\n\r\n"
        try:
            self._writer.write(head.encode() + (body or b""))
            await self._writer.drain()
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except _BROKEN as error:
            raise BrokenOffError(began=isinstance(error, asyncio.IncompleteReadError) and bool(error.partial)) from None
        pairs = (line.partition(":") for line in lines[1:] if line)
        self._head = Head(int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs})
        return self._head

    async def json(self) -> Any:
        """The unary answer. BrokenOffError(began=True) when it is not whole."""
        assert self._head is not None
        try:
            data = await self._reader.readexactly(int(self._head.headers["content-length"]))
        except _BROKEN:
            raise BrokenOffError(began=True) from None
        return json.loads(data)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events up to the end of the answer. BrokenOffError(began=True) when it has none."""
        rest = b""
        while chunk := await self._chunk():
            *texts, rest = (rest + chunk).split(b"\n\n")
            for text in texts:
                yield json.loads(text.removeprefix(b"data: "))
        assert not rest, f"half an event at the end: {rest!r}"

    async def _chunk(self) -> bytes:
        try:
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            return (await self._reader.readexactly(size + 2))[:-2]
        except _BROKEN:
            raise BrokenOffError(began=True) from None
