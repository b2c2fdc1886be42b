"""Connection events of a link: connected, disconnected, handshake failed. Never blocks.

A broken connection makes a peer suspect, nothing more. There are no events for `inproc`, where only the process itself
can fail, and none for refused connections, which ZeroMQ does not report; `probe` detects those.
"""

import os
from collections.abc import Iterator
from enum import Enum
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.common.base.errors import OutOfSocketsError
from kvferry.common.transport import nonblocking
from kvferry.common.transport.base_socket import BaseSocket
from kvferry.common.transport.context import TransportContext, raising_out_of_sockets
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.nonblocking import RECEIVE_BATCH

HANDSHAKE_FAILURES_BEFORE_WARNING = 3
"""Consecutive failures after which the owner of a connection logs one warning: a peer that exits may cause one."""


class ConnectionEvent(Enum):
    """A change of a connection's state."""

    CONNECTED = "connected"
    """The handshake succeeded: messages can pass."""
    DISCONNECTED = "disconnected"
    HANDSHAKE_FAILED = "handshake failed"
    """Connected, but the handshake failed: keys that do not match, or the peer exited. ZeroMQ retries."""
    GAVE_UP = "gave up"
    """The handshake failed and ZeroMQ does not retry: only one end has keys, or the peer does not speak ZeroMQ."""


_EVENTS: dict[int, ConnectionEvent] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: ConnectionEvent.CONNECTED,
    zmq.EVENT_DISCONNECTED: ConnectionEvent.DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ConnectionEvent.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: ConnectionEvent.GAVE_UP,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ConnectionEvent.GAVE_UP,
}


class Monitored(Protocol):
    """A socket whose connections can be monitored, such as a LinkSocket."""

    @property
    def is_open(self) -> bool: ...

    @property
    def poll_handle(self) -> "zmq.Socket[bytes]": ...


def handshake_advice(context: TransportContext, peer: str) -> str:
    """What to check when the handshakes with a peer ("node", "proxy") keep failing; ends a log line."""
    if context.security is None:
        return f"check that it is a kvferry {peer} and, like this process, runs without keys"
    return f"check that it is a kvferry {peer} with the key in its endpoint, and that it allows this process' key"


class LinkMonitor(BaseSocket):
    """Receives the connection events of one link. Open it between the link's `open` and `connect`."""

    WHAT = "the monitor"

    def __init__(self, context: TransportContext, link: Monitored) -> None:
        super().__init__(context)
        self._link = link

    def open(self) -> None:
        """Start monitoring; must be called by the thread that owns the link. After OutOfSocketsError it is closed."""
        self._require_closed()
        address = f"inproc://link-monitor-{os.urandom(8).hex()}"
        self._socket = socket = self._context.open_socket(zmq.PAIR, "link monitor")
        try:
            # No bound: ZeroMQ's IO thread would block when it sends an event to a full monitor socket.
            socket.setsockopt(zmq.RCVHWM, 0)
            with raising_out_of_sockets("link monitor"):  # ZeroMQ creates a socket that publishes the link's events
                self._link.poll_handle.monitor(address, sum(_EVENTS))
            socket.connect(address)
        except BaseException:
            self.close()
            raise

    def receive(self, limit: int = RECEIVE_BATCH) -> Iterator[ConnectionEvent]:
        """Events since the last call, oldest first."""
        for frames in nonblocking.receive(self.poll_handle, limit):
            event = _EVENTS.get(parse_monitor_message([bytes(frame) for frame in frames])["event"])
            if event is not None:
                yield event

    def close(self) -> None:
        """Stop monitoring; before or after the link is closed. May be called twice."""
        if self.is_open and self._link.is_open:
            self._link.poll_handle.monitor(None, 0)
        super().close()


def connect_watched(link: LinkSocket, monitor: LinkMonitor, endpoint: str) -> None:
    """Open a link and its monitor, and connect. After ConfigError or OutOfSocketsError both are closed."""
    try:
        link.open()
        monitor.open()
        link.connect(endpoint)
    except BaseException as error:
        monitor.close()
        link.close()
        if isinstance(error, OutOfSocketsError):
            # Name the link: which of its sockets cannot be opened may differ from try to try.
            raise OutOfSocketsError(f"link to {endpoint}", error.reason) from None
        raise
