"""The shapes of ASGI that the HTTP layer touches. Types only.

One HTTP request: its incoming side, whether its client is still there, and what the access log will say of it.

Only this object calls ASGI's `receive`. While a request is answered it keeps awaiting it, because that is the only
way to learn at once that the client left. Knows nothing of routes, models or errors' texts.

What resources share: the exchange behind a falcon request, JSON answers, HEAD for whatever answers GET.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import cast

import orjson
from falcon.asgi import Request, Response

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import RequestId
from kvferry.router.api import EndEvent, Outcome
from kvferry.router.http.errors import ClientGoneError

Scope = MutableMapping[str, object]
AsgiMessage = MutableMapping[str, object]
Receive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]


def message_bytes(message: AsgiMessage) -> bytes:
    """The `body` of an `http.request` or `http.response.body` message; empty where there is none."""
    body = message.get("body", b"")
    if not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(f"an ASGI body is bytes, not {type(body).__name__}")
    return bytes(body)


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
        """The client's own id, once it was checked."""
        self.model = ""
        """The model's name, once it is known to exist."""
        self.outcome: Outcome | None = None
        self.generation: EndEvent | None = None
        """How the generation ended, where one was begun and waited for."""
        self.status = 0
        """Of the head that was sent; 0 before."""
        self.gone = False
        """The client left before its answer was complete."""
        self.finished = False
        """The answer's last byte was handed to the server."""
        self._headers = dict(cast("Iterable[tuple[bytes, bytes]]", scope.get("headers", ())))
        self._receive = receive
        self._body_ended = False
        self._on_gone: Callable[[], None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def content_length(self) -> int | None:
        """What the client says the body is long, in bytes; None where it does not or says nonsense."""
        text = self._headers.get(b"content-length", b"")
        return int(text) if text.isdigit() and len(text) < 20 else None

    @property
    def has_two_lengths(self) -> bool:
        """The head has both Content-Length and Transfer-Encoding."""
        return b"content-length" in self._headers and b"transfer-encoding" in self._headers

    @property
    def expects_continue(self) -> bool:
        """The client sends its body only when asked to."""
        return self._headers.get(b"expect", b"").lower() == b"100-continue"

    @property
    def body_ended(self) -> bool:
        """All of the request's body was read."""
        return self._body_ended

    async def read_chunk(self) -> bytes | None:
        """The next piece of the body, None at its end. Raises ClientGoneError."""
        if self._watcher is not None:
            raise InvariantError("the body is read after the watch for the client's leaving began")
        if self._body_ended:
            return None
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._leave()
            raise ClientGoneError("the client left while it sent its request")
        self._body_ended = not message.get("more_body", False)
        return message_bytes(message)

    def watch(self, on_gone: Callable[[], None]) -> None:
        """From now on call `on_gone`, once, when the client leaves before its answer is complete."""
        if self._watcher is not None:
            raise InvariantError("the client is watched already")
        self._on_gone = on_gone
        self._watcher = asyncio.get_running_loop().create_task(self._await_disconnect(), name="watch-client")

    async def close(self) -> None:
        """End the watch. Safe to call any number of times."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)

    def note_sent(self, message: AsgiMessage) -> None:
        """Follow the outgoing side: `message` is about to be handed to the server."""
        if message["type"] == "http.response.start":
            self.status = cast("int", message["status"])
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.finished = True

    def check_invariants(self) -> None:
        """Raise InvariantError where the parts of the state contradict one another."""
        if self.finished and not self.status:
            raise InvariantError("an answer ended that has no head")
        if self.gone and self.finished:
            raise InvariantError("a client left before the end of an answer that was complete")
        if self.generation is not None and self.outcome is None:
            raise InvariantError("tokens were counted for a request that has no outcome")

    async def _await_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # The rest of a body that nobody reads, or the server's empty message after a read one.
        self._leave()

    def _leave(self) -> None:
        # A server also says "disconnect" once the answer is complete.
        if self.finished or self.gone:
            return
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()


def exchange_of(req: Request) -> Exchange:
    """The exchange that the shell put beside this request."""
    return cast("Exchange", req.scope[SCOPE_KEY])


def answer_json(resp: Response, value: object) -> None:
    """Make `value` the answer."""
    resp.data = orjson.dumps(value)


class GetResource:
    """A resource that answers GET, and HEAD with the same head."""

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """Answer; `params` are the fields of the path."""
        raise NotImplementedError

    async def on_head(self, req: Request, resp: Response, **params: str) -> None:
        """The head of what GET would answer; falcon leaves the body out."""
        await self.on_get(req, resp, **params)
