"""gunicorn's worker class: uvicorn's, which leaves without losing a request that is on its way.

uvicorn by itself goes on accepting for a moment after SIGTERM, and then closes every connection on which no request is
being answered, new ones too: whoever has just connected is reset. Here a worker that is told to leave accepts nothing
more at once (the others of its gunicorn do), and connections that wait for their first request live on for a moment.
What is answered then is the application's business: the router, which drains by then, says 503.
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
"""How long a worker that leaves waits for the first request of a connection that it accepted before. Less than what
`graceful_timeout` adds to the drain."""


class RouterState(ServerState):
    """What all connections of a worker share."""

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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """One that was accepted just before the worker was told to leave may get here after it."""
        super().connection_made(transport)
        if self._state.leaving:
            self.shutdown()

    def shutdown(self) -> None:
        """Called when the worker leaves, by uvicorn once more: closes an idle one, any other after its next answer."""
        if self._leaving:
            return
        self._leaving = True
        if self._request_is_due:
            self.loop.call_later(REQUEST_WAIT_S, self._give_up)
        else:
            self._make_last()
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client. On a connection that is left, the request that they end is the last one."""
        super().data_received(data)
        if self._leaving:
            self._make_last()

    @property
    def _request_is_due(self) -> bool:
        """Nobody connects without a request to come, and half of a head is the same."""
        cycle = self.cycle
        return cycle is None or (cycle.response_complete and self.conn.trailing_data[0] != b"")

    def _make_last(self) -> None:
        """Close after the answer that is under way, and say so in its head."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        cycle.keep_alive = False
        if not cycle.response_started and CLOSE_HEADER not in cycle.default_headers:
            cycle.default_headers = [*cycle.default_headers, CLOSE_HEADER]

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()


class RouterServer(Server):
    """The server of one worker. Made inside the event loop that runs it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.server_state: RouterState = RouterState()
        self.servers: list[asyncio.base_events.Server] = []
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of signals that end a worker. The main loop hears of it at its next tick: `shutdown`."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self.leave)

    def leave(self) -> None:
        """Leave new connections to the other workers, which share the socket, and tell those that are there."""
        self.server_state.leaving = True
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns when no connection is left. `leave` comes first, even where no signal told it to."""
        self.leave()
        await super().shutdown(sockets)


class RouterWorker(UvicornWorker):  # type: ignore[misc] # uvicorn_worker has no types
    """What `worker_class` names."""

    CONFIG_KWARGS = {"loop": "auto", "http": RouterProtocol}  # noqa: RUF012 # as the base class has it

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Called in the arbiter, before the fork."""
        super().__init__(*args, **kwargs)
        self._never_alive = self.tmp.last_update()

    @property
    def serves(self) -> bool:
        """Asked in the arbiter: the first sign of life comes from the server's main loop, which starts with serving."""
        return bool(self.tmp.last_update() != self._never_alive)

    async def _serve(self) -> None:
        """As in the base class, but for the server's class."""
        self.config.app = self.wsgi
        server = RouterServer(self.config)
        self._install_sigquit_handler()
        await server.serve(sockets=self.sockets)
        if not server.started:
            sys.exit(Arbiter.WORKER_BOOT_ERROR)
