"""Tells when a link's connection came to stand or broke. Never waits.

A broken connection only makes a peer suspect. Silent for `inproc`, where nothing can break but the process itself, and
about refusals, which ZeroMQ does not tell: for those there is `probe`.
"""

import os
from collections.abc import Iterator
from enum import Enum
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.errors import InvariantError
from common.transport import nowait
from common.transport.context import TransportContext
from common.transport.nowait import RECEIVE_BATCH


class LinkEvent(Enum):
    """What happened to the connection."""

    CONNECTED = "connected"
    """The handshake is done: messages can pass."""
    DISCONNECTED = "disconnected"
    HANDSHAKE_FAILED = "handshake failed"
    """Reached, and no understanding: other keys, or the process ended just then. ZeroMQ tries again."""
    GAVE_UP = "gave up"
    """As before, and ZeroMQ does not try again: one end has keys and the other none, or it is not ZeroMQ."""


_EVENTS: dict[int, LinkEvent] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: LinkEvent.CONNECTED,
    zmq.EVENT_DISCONNECTED: LinkEvent.DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: LinkEvent.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: LinkEvent.GAVE_UP,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: LinkEvent.GAVE_UP,
}


class Monitored(Protocol):
    """What has connections to watch: a LinkSocket, say."""

    @property
    def is_open(self) -> bool:
        """Whether there is a socket."""
        ...

    @property
    def poll_handle(self) -> "zmq.Socket[bytes]":
        """The socket."""
        ...


class LinkMonitor:
    """Connection events of one link. Opened between the link's `open` and `connect`, closed before or after it."""

    def __init__(self, context: TransportContext, link: Monitored) -> None:
        self._context = context
        self._link = link
        self._socket: zmq.Socket[bytes] | None = None

    def open(self) -> None:
        """Start to watch. Belongs to the thread that owns the link."""
        if self._socket is not None:
            raise InvariantError("the monitor is open already")
        address = f"inproc://link-monitor-{os.urandom(8).hex()}"
        socket = self._context.open_socket(zmq.PAIR, "link monitor")
        # Without a bound: ZeroMQ's IO thread would wait in sending an event to a full monitor.
        socket.setsockopt(zmq.RCVHWM, 0)
        self._link.poll_handle.monitor(address, sum(_EVENTS))
        socket.connect(address)
        self._socket = socket

    @property
    def poll_handle(self) -> "zmq.Socket[bytes]":
        """What a PollLoop waits for."""
        if self._socket is None:
            raise InvariantError("the monitor is not open")
        return self._socket

    @property
    def fd(self) -> int:
        """The descriptor that an event loop watches; see AsyncReceiver."""
        return int(self.poll_handle.getsockopt(zmq.FD))

    def readable(self) -> bool:
        """Whether an event is there."""
        return nowait.readable(self.poll_handle)

    def receive(self, limit: int = RECEIVE_BATCH) -> Iterator[LinkEvent]:
        """Events since the last call, oldest first."""
        for frames in nowait.receive(self.poll_handle, limit):
            event = _EVENTS.get(parse_monitor_message([bytes(frame) for frame in frames])["event"])
            if event is not None:
                yield event

    def close(self) -> None:
        """Stop watching. Twice does no harm."""
        if self._socket is None:
            return
        if self._link.is_open:
            self._link.poll_handle.monitor(None, 0)
        self._context.close_socket(self._socket)
        self._socket = None
