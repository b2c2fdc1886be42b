"""A keep-alive HTTP/1.1 connection that records when each part of an answer arrived.

An asyncio protocol without streams: each part is passed on in the call in which the loop read it, with one reading of
the monotonic clock.
"""

import asyncio
import ssl
import time
from collections.abc import Callable

from kvferry.ops.bench.serve.response import MalformedAnswerError, ResponseReader
from kvferry.ops.cli.target import Target

OnBody = Callable[[float, bytes], None]
"""Called with the time of arrival (monotonic clock, seconds) and bytes of the body."""


class CutOffError(Exception):
    """The connection closed before the answer was complete."""


class HttpConnection(asyncio.Protocol):
    """Sends one request at a time. Made by `open`; the caller must `close` it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._on_body: OnBody | None = None
        self._done: asyncio.Future[None] | None = None
        self._lost = False

    @classmethod
    async def open(cls, target: Target) -> "HttpConnection":
        """Connect. Raises OSError if that fails."""
        context = ssl.create_default_context() if target.tls else None
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: cls(target), target.host, target.port, ssl=context
        )
        return connection

    @property
    def is_reusable(self) -> bool:
        """Whether another request can be sent on it."""
        kept = self._reader is None or self._reader.keeps_connection
        return kept and not self._lost and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close immediately, also during an answer."""
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, method: str, path: str, body: bytes, accept: str, on_body: OnBody) -> int:
        """Send a request; returns the status after the whole answer has arrived.

        Raises CutOffError and MalformedAnswerError.
        """
        assert self._transport is not None
        self._reader, self._on_body = ResponseReader(), on_body
        self._done = asyncio.get_running_loop().create_future()
        head = (
            f"{method} {self._target.prefix}{path} HTTP/1.1\r\nHost: {self._target.authority}\r\nAccept: {accept}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        if self._lost:
            raise CutOffError
        self._transport.write(head.encode("ascii") + body)
        await self._done
        return self._reader.status

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        reader, done = self._reader, self._done
        if reader is None or done is None or done.done():
            # Bytes without a request: the connection is out of step.
            self.close()
            return
        try:
            body = reader.feed(data)
            if body and self._on_body is not None:
                self._on_body(now, body)
        except MalformedAnswerError as error:
            self._finish(error)
            return
        if reader.complete:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        whole = self._reader is not None and self._reader.end()
        self._finish(None if whole else CutOffError())

    def _finish(self, error: Exception | None) -> None:
        done = self._done
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            self.close()
            done.set_exception(error)
