"""What every socket of this package has: it is made once, watched by a loop, read without waiting, closed once.

Knows nothing of what goes over it. Owned by one thread or event loop.
"""

from typing import ClassVar

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.transport import nonblocking as nowait
from kvferry.common.transport.context import TransportContext


class OwnSocket:
    """The socket of one object, from when it was made until `close`."""

    WHAT: ClassVar[str]
    """How error texts call it."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a socket."""
        return self._socket is not None

    @property
    def poll_handle(self) -> "zmq.Socket[bytes]":
        """What a PollLoop waits for."""
        if self._socket is None:
            raise InvariantError(f"{self.WHAT} is not open")
        return self._socket

    @property
    def fd(self) -> int:
        """The descriptor that an event loop watches. Edge-triggered: see AsyncReceiver."""
        return int(self.poll_handle.getsockopt(zmq.FD))

    def readable(self) -> bool:
        """Whether something is there to be received."""
        return nowait.readable(self.poll_handle)

    def close(self) -> None:
        """Close the socket. Twice does no harm."""
        if self._socket is not None:
            self._context.close_socket(self._socket)
            self._socket = None

    def _demand_new(self) -> None:
        if self._socket is not None:
            raise InvariantError(f"{self.WHAT} is open already")
