"""gunicorn's worker class: uvicorn's, changed to stop without losing a request in flight.

uvicorn by itself keeps accepting for a moment after SIGTERM and then closes every connection that has no request in
progress, new ones too: a client that has just connected gets a reset. Here a stopping worker stops accepting
immediately (the other workers of its gunicorn accept), and a connection that waits for its first request stays open for
REQUEST_WAIT_S. The application chooses the answer: a draining router answers 503.
"""

import asyncio
import socket
import sys
from types import FrameType

from gunicorn.arbiter import Arbiter
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server, ServerState
from uvicorn_worker import UvicornWorker

REQUEST_WAIT_S = 3.0
"""How long a stopping worker waits for the first request of a connection that it accepted before. Must be less than
what `graceful_timeout` adds to the drain."""


class RouterState(ServerState):
    """State that all connections of a worker share."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving = False


class RouterProtocol(H11Protocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: RouterState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._state = server_state
        self._leaving = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        """Start reading. A connection accepted just before the stop signal may arrive here after it."""
        super().connection_made(transport)
        if self._state.leaving:
            self.shutdown()

    def shutdown(self) -> None:
        """Close an idle connection, and any other one after its next answer. Called when the worker stops, and again by
        uvicorn."""
        if self._leaving:
            return
        self._leaving = True
        if self._request_is_due:
            self.loop.call_later(REQUEST_WAIT_S, self._close_unless_closing)
        else:
            self._make_last()
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client. On a stopping worker, the request that they complete is the connection's last."""
        super().data_received(data)
        if self._leaving:
            self._make_last()

    @property
    def _request_is_due(self) -> bool:
        """Whether the client is about to send a request: on a new connection, or after part of a request head."""
        cycle = self.cycle
        return cycle is None or (cycle.response_complete and self.conn.trailing_data[0] != b"")

    def _make_last(self) -> None:
        """Close the connection after the answer in progress, with `Connection: close` in its head."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        cycle.keep_alive = False
        if not cycle.response_started and CLOSE_HEADER not in cycle.default_headers:
            cycle.default_headers = [*cycle.default_headers, CLOSE_HEADER]

    def _close_unless_closing(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()


class RouterServer(Server):
    """The server of one worker. Must be created inside the event loop that runs it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.server_state: RouterState = RouterState()
        self.servers: list[asyncio.base_events.Server] = []
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a stop signal. uvicorn's main loop sees it at its next tick and calls `shutdown`."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self.leave)

    def leave(self) -> None:
        """Stop accepting (the other workers share the socket), and shut down the open connections."""
        self.server_state.leaving = True
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Return when no connection is left. Calls `leave` first, also without a signal."""
        self.leave()
        await super().shutdown(sockets)


class RouterWorker(UvicornWorker):  # type: ignore[misc] # uvicorn_worker has no types
    """The class that gunicorn's `worker_class` names."""

    CONFIG_KWARGS = {"loop": "auto", "http": RouterProtocol}  # noqa: RUF012 # as in the base class

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Runs in the arbiter, before the fork."""
        super().__init__(*args, **kwargs)
        self._never_alive = self.tmp.last_update()

    @property
    def serves(self) -> bool:
        """Whether it serves; used in the arbiter. The first liveness update comes from the server's main loop, which
        runs while it serves."""
        return bool(self.tmp.last_update() != self._never_alive)

    async def _serve(self) -> None:
        """As in the base class, with RouterServer."""
        self.config.app = self.wsgi
        server = RouterServer(self.config)
        self._install_sigquit_handler()
        await server.serve(sockets=self.sockets)
        if not server.started:
            sys.exit(Arbiter.WORKER_BOOT_ERROR)
