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

from kvferry.common.base.errors import OutOfSocketsError
from kvferry.common.transport import nonblocking as nowait
from kvferry.common.transport.base_socket import OwnSocket
from kvferry.common.transport.context import TransportContext, making
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.nonblocking import RECEIVE_BATCH


class ConnectionEvent(Enum):
    """What happened to the connection."""

    CONNECTED = "connected"
    """The handshake is done: messages can pass."""
    DISCONNECTED = "disconnected"
    HANDSHAKE_FAILED = "handshake failed"
    """Reached, and no understanding: other keys, or the process ended just then. ZeroMQ tries again."""
    GAVE_UP = "gave up"
    """As before, and ZeroMQ does not try again: one end has keys and the other none, or it is not ZeroMQ."""


_EVENTS: dict[int, ConnectionEvent] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: ConnectionEvent.CONNECTED,
    zmq.EVENT_DISCONNECTED: ConnectionEvent.DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ConnectionEvent.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: ConnectionEvent.GAVE_UP,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ConnectionEvent.GAVE_UP,
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


class LinkMonitor(OwnSocket):
    """Connection events of one link. Opened between the link's `open` and `connect`, closed before or after it."""

    WHAT = "the monitor"

    def __init__(self, context: TransportContext, link: Monitored) -> None:
        super().__init__(context)
        self._link = link

    def open(self) -> None:
        """Start to watch. Belongs to the thread that owns the link. OutOfSocketsError: it is closed still."""
        self._demand_new()
        address = f"inproc://link-monitor-{os.urandom(8).hex()}"
        self._socket = socket = self._context.open_socket(zmq.PAIR, "link monitor")
        try:
            # Without a bound: ZeroMQ's IO thread would wait in sending an event to a full monitor.
            socket.setsockopt(zmq.RCVHWM, 0)
            with making("link monitor"):  # the link gets a socket of ZeroMQ's own, which tells of its events
                self._link.poll_handle.monitor(address, sum(_EVENTS))
            socket.connect(address)
        except BaseException:
            self.close()
            raise

    def receive(self, limit: int = RECEIVE_BATCH) -> Iterator[ConnectionEvent]:
        """Events since the last call, oldest first."""
        for frames in nowait.receive(self.poll_handle, limit):
            event = _EVENTS.get(parse_monitor_message([bytes(frame) for frame in frames])["event"])
            if event is not None:
                yield event

    def close(self) -> None:
        """Stop watching. Twice does no harm."""
        if self.is_open and self._link.is_open:
            self._link.poll_handle.monitor(None, 0)
        super().close()


def connect_watched(link: LinkSocket, monitor: LinkMonitor, endpoint: str) -> None:
    """Open a link and its monitor, and connect. ConfigError or OutOfSocketsError: both are closed again."""
    try:
        link.open()
        monitor.open()
        link.connect(endpoint)
    except BaseException as error:
        monitor.close()
        link.close()
        if isinstance(error, OutOfSocketsError):  # which of its sockets lacked may differ each time it is tried
            raise OutOfSocketsError(f"link to {endpoint}", error.reason) from None
        raise
