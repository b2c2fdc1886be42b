"""One HTTP request: its incoming side, whether its client is still connected, and what the access log reports of it.

Only `Exchange` calls ASGI's `receive`. While a request is answered it keeps awaiting it, because nothing else reports
a disconnect immediately. Knows nothing of routes, models or error texts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import cast

from falcon.asgi import Request

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import RequestId
from kvferry.router.api import EndEvent, Outcome
from kvferry.router.http.errors import ClientGoneError

Scope = MutableMapping[str, object]
AsgiMessage = MutableMapping[str, object]
Receive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]

SCOPE_KEY = "kvferry.exchange"


class Exchange:
    """State of one HTTP request, from its head to the last byte of its answer."""

    def __init__(self, scope: Scope, receive: Receive, request_id: RequestId, started_s: float) -> None:
        self.request_id = request_id
        self.started_s = started_s
        self.method = str(scope.get("method", ""))
        self.path = str(scope.get("path", ""))
        self.http_version = str(scope.get("http_version", "1.1"))
        self.client_id = ""
        """The client's own id, set when it was checked."""
        self.model = ""
        """The model's name, set when it is known to exist."""
        self.outcome: Outcome | None = None
        self.generation: EndEvent | None = None
        """How the generation ended; None if none was started or awaited to its end."""
        self.status = 0
        """Status of the head that was sent; 0 before."""
        self.gone = False
        """The client disconnected before its answer was complete."""
        self.finished = False
        """The last byte of the answer was passed to the server."""
        self._headers = dict(cast("Iterable[tuple[bytes, bytes]]", scope.get("headers", ())))
        self._receive = receive
        self._body_ended = False
        self._on_gone: Callable[[], None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def content_length(self) -> int | None:
        """Content-Length in bytes; None if absent or not a number."""
        text = self._headers.get(b"content-length", b"")
        return int(text) if text.isdigit() and len(text) < 20 else None

    @property
    def has_two_lengths(self) -> bool:
        """Whether the head has both Content-Length and Transfer-Encoding."""
        return b"content-length" in self._headers and b"transfer-encoding" in self._headers

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends its body."""
        return self._headers.get(b"expect", b"").lower() == b"100-continue"

    @property
    def body_ended(self) -> bool:
        return self._body_ended

    async def read_chunk(self) -> bytes | None:
        """The next piece of the body, None at its end. Raises ClientGoneError."""
        if self._watcher is not None:
            raise InvariantError("the body is read after the watch for a disconnect began")
        if self._body_ended:
            return None
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._disconnected()
            raise ClientGoneError("the client disconnected while it sent its request")
        self._body_ended = not message.get("more_body", False)
        return message_bytes(message)

    def watch(self, on_gone: Callable[[], None]) -> None:
        """From now on call `on_gone`, once, when the client disconnects before its answer is complete."""
        if self._watcher is not None:
            raise InvariantError("the client is watched already")
        self._on_gone = on_gone
        self._watcher = asyncio.get_running_loop().create_task(self._await_disconnect(), name="watch-client")

    async def close(self) -> None:
        """End the watch. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)

    def note_sent(self, message: AsgiMessage) -> None:
        """Record an outgoing `message`; must be called before it is passed to the server."""
        if message["type"] == "http.response.start":
            self.status = cast("int", message["status"])
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.finished = True

    def check_invariants(self) -> None:
        """Raise InvariantError where the parts of the state contradict one another."""
        if self.finished and not self.status:
            raise InvariantError("an answer ended that has no head")
        if self.gone and self.finished:
            raise InvariantError("a client counts as disconnected although its answer was complete")
        if self.generation is not None and self.outcome is None:
            raise InvariantError("tokens were counted for a request that has no outcome")

    async def _await_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # The rest of a body that is not read, or the server's empty message after one that was read.
        self._disconnected()

    def _disconnected(self) -> None:
        # A server also sends "disconnect" when the answer is complete.
        if self.finished or self.gone:
            return
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()


def message_bytes(message: AsgiMessage) -> bytes:
    """The `body` of an `http.request` or `http.response.body` message; empty if it has none."""
    body = message.get("body", b"")
    if not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(f"an ASGI body is bytes, not {type(body).__name__}")
    return bytes(body)


def exchange_of(req: Request) -> Exchange:
    """The Exchange that the shell stored in the scope of this request."""
    return cast("Exchange", req.scope[SCOPE_KEY])
