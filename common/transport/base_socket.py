"""The base of this package's sockets: opened once, polled, received from without blocking, closed once.

Does not interpret messages. Owned by one thread or event loop.
"""

from typing import ClassVar

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.transport import nonblocking
from kvferry.common.transport.context import TransportContext


class BaseSocket:
    """Owner of one ZeroMQ socket. A subclass creates the socket, `close` closes it."""

    WHAT: ClassVar[str]
    """The name of the socket in error texts."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def poll_handle(self) -> "zmq.Socket[bytes]":
        """The socket, for a PollLoop."""
        if self._socket is None:
            raise InvariantError(f"{self.WHAT} is not open")
        return self._socket

    @property
    def fd(self) -> int:
        """The descriptor for an event loop. Edge-triggered: see AsyncReceiver."""
        return int(self.poll_handle.getsockopt(zmq.FD))

    def readable(self) -> bool:
        """Whether a message can be received now."""
        return nonblocking.readable(self.poll_handle)

    def close(self) -> None:
        """Close the socket. May be called twice."""
        if self._socket is not None:
            self._context.close_socket(self._socket)
            self._socket = None

    def _require_closed(self) -> None:
        if self._socket is not None:
            raise InvariantError(f"{self.WHAT} is open already")
