"""The ASGI shell around falcon's app: lifespan, client disconnects, the access log, answers to unexpected exceptions.

Falcon notices a disconnect only while it streams, and reads from the body before it looks at the path. So the shell
passes it a request without a body; `Exchange` owns the real incoming side. Decides nothing about requests.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import cast

import falcon.asgi
from falcon import COMBINED_METHODS
from falcon.asgi import Request, Response

from kvferry.common.base.run_with_timeout import run_with_timeout
from kvferry.router.http.access_log import log_exchange
from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.errors import AmbiguousLengthError, ClientGoneError, HttpVersionError, problem_of
from kvferry.router.http.exchange import SCOPE_KEY, AsgiMessage, AsgiSend, Exchange, Receive, Scope

_KNOWN_METHODS = frozenset(COMBINED_METHODS) - {"WEBSOCKET"}
_HTTP_VERSIONS = ("1.0", "1.1")
"""The server parses any version number, also those it does not implement (of HTTP/2's preface, for example)."""
_NO_BODY: AsgiMessage = {"type": "http.request", "body": b"", "more_body": False}
_BODY_UNREAD = (400, 413, 505)
"""Statuses of answers that are sent before the body was read."""
LINGER_S = 2.0
"""How long the rest of a refused body is read and dropped, so that the client reads the answer."""


class AsgiShell:
    """An ASGI application."""

    def __init__(self, app: falcon.asgi.App[Request, Response], deps: AppDependencies) -> None:
        self._app = app
        self._deps = deps

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        """Serve one scope: `http` or `lifespan`; a `websocket` is closed."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            raise ValueError(f"ASGI scope {scope['type']!r} is not served")

    async def _http(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        deps = self._deps
        # ASGI allows iterables that can be read only once.
        headers = cast("Iterable[Iterable[bytes]]", scope.get("headers", ()))
        scope = {**scope, "headers": [tuple(pair) for pair in headers]}
        exchange = Exchange(scope, receive, deps.new_request_id(), deps.clock.now())
        answer = _Answer(exchange, send)
        inner: Scope = {**scope, SCOPE_KEY: exchange}
        if exchange.method not in _KNOWN_METHODS:
            inner["method"] = "TRACE"  # No resource has it: falcon answers 404 or 405, as for any other wrong method.
        try:
            if exchange.http_version not in _HTTP_VERSIONS:
                await answer.fail(
                    HttpVersionError(f"head: HTTP/{exchange.http_version} is not supported; use HTTP/1.1")
                )
            elif exchange.has_two_lengths:
                await answer.fail(AmbiguousLengthError("head: has both Content-Length and Transfer-Encoding; send one"))
            else:
                await self._app(dict(inner), _receive_no_body, answer.send)
        except Exception as error:
            deps.logger.error("the HTTP layer failed", exc_info=error, extra={"request_id": exchange.request_id})
            await answer.fail(error)
        finally:
            await exchange.close()
            self._record(exchange)

    def _record(self, exchange: Exchange) -> None:
        if exchange.model:
            success = exchange.outcome in ("stop", "length") and exchange.finished
            self._deps.metrics.ended(exchange.model, success=success)
        log_exchange(self._deps.access_log, exchange, (self._deps.clock.now() - exchange.started_s) * 1e3)

    async def _lifespan(self, receive: Receive, send: AsgiSend) -> None:
        while True:
            phase = str((await receive())["type"]).removeprefix("lifespan.")
            if phase not in ("startup", "shutdown"):
                continue  # an event of a later ASGI version
            step = self._deps.on_startup if phase == "startup" else self._deps.on_shutdown
            try:
                await step()
            except Exception as error:
                self._deps.logger.error("%s failed", phase, exc_info=error)
                await send({"type": f"lifespan.{phase}.failed", "message": str(error)})
                return
            await send({"type": f"lifespan.{phase}.complete"})
            if phase == "shutdown":
                return


class _Answer:
    """The outgoing side of one exchange."""

    def __init__(self, exchange: Exchange, send: AsgiSend) -> None:
        self._exchange = exchange
        self._send = send

    async def send(self, message: AsgiMessage) -> None:
        """Pass a message to the server, unless the client has disconnected."""
        exchange = self._exchange
        if exchange.gone:
            return
        if message["type"] == "http.response.start":
            headers = [*_headers(message), (b"x-request-id", exchange.request_id.encode())]
            message = {**message, "headers": headers}
        exchange.note_sent(message)
        if exchange.status in _BODY_UNREAD and exchange.finished:
            # Closing with unread bytes resets the connection, and the client may lose the answer.
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer with `error` if no head was sent. Otherwise the server closes the connection: the answer is cut."""
        if self._exchange.status:
            return
        problem = problem_of(error)
        body = problem.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in problem.headers]
        await self.send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def _drain(self) -> None:
        exchange = self._exchange
        if exchange.expects_continue or exchange.body_ended:
            return
        with suppress(TimeoutError, ClientGoneError):
            await run_with_timeout(LINGER_S, _read_to_the_end(exchange))


async def _read_to_the_end(exchange: Exchange) -> None:
    while await exchange.read_chunk() is not None:
        pass


async def _receive_no_body() -> AsgiMessage:
    return dict(_NO_BODY)


def _headers(message: AsgiMessage) -> list[tuple[bytes, bytes]]:
    headers = message.get("headers", ())
    if not isinstance(headers, list | tuple):
        raise TypeError("ASGI headers are a list of pairs")
    return list(headers)
