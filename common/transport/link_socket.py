"""A client's end of one link: a DEALER connected to one node. Never blocks; owned by one thread or event loop.

With IMMEDIATE, ZeroMQ accepts a message only while the connection is up. So it never delivers a message meant for a
dead incarnation to the next one at the same address; `discard` drops what the outbox holds. A message from the node is
one frame (`framing.py`): with IMMEDIATE, libzmq is not safe for more.
"""

import errno
from collections.abc import Callable, Iterator, Sequence

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation, routing_id
from kvferry.common.config.endpoints import parse_endpoint
from kvferry.common.protocol.wire import Frame
from kvferry.common.transport import nonblocking, options
from kvferry.common.transport.base_socket import BaseSocket
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.framing import unpack
from kvferry.common.transport.nonblocking import RECEIVE_BATCH, Outbox, SendResult
from kvferry.common.transport.options import SocketOptions


class LinkSocket(BaseSocket):
    """Sends to and receives from the node at one endpoint. Call `open`, then `connect`; finally `close`."""

    WHAT = "the link"

    def __init__(self, context: TransportContext, self_id: Incarnation, socket_options: SocketOptions) -> None:
        super().__init__(context)
        self._self_id = self_id
        self._options = socket_options
        self._endpoint = ""
        self._address = ""
        self._outbox = Outbox(socket_options.outbox_messages, socket_options.outbox_bytes)
        self.dropped = 0
        """Messages dropped by an overflow or by `discard`."""
        self.after_send: Callable[[], None] | None = None
        """Called after each attempt to send, which may have consumed the descriptor's edge-triggered event."""

    def open(self) -> None:
        """Create the socket. Attach a monitor between this and `connect`."""
        self._require_closed()
        socket = self._context.open_socket(zmq.DEALER, "link socket")
        options.apply(socket, self._options)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.ROUTING_ID, routing_id(self._self_id))
        self._socket = socket

    def connect(self, endpoint: str) -> None:
        """Start to connect; ZeroMQ keeps trying. ConfigError when nothing can connect to this endpoint."""
        if self._address:
            raise InvariantError(f"the link is connected to {self._endpoint} already")
        self._address = options.connect(self._context, self.poll_handle, endpoint, self._options)
        self._endpoint = endpoint

    def reconnect(self) -> None:
        """Drop queued messages and make sure that a new connection is attempted. Call it when the peer has died.

        ZeroMQ reconnects by itself, except over `inproc`, where this disconnects and connects again.
        """
        self.discard()
        if parse_endpoint(self._endpoint).scheme == "inproc":
            self._disconnect()
            self.connect(self._endpoint)

    @property
    def endpoint(self) -> str:
        """The endpoint passed to `connect`."""
        return self._endpoint

    @property
    def has_pending(self) -> bool:
        """Whether the outbox holds messages, so that `flush` must be called."""
        return bool(self._outbox)

    def writable(self) -> bool:
        """Whether the connection is up and has room for a message."""
        return nonblocking.writable(self.poll_handle)

    def send(self, frames: Sequence[Frame]) -> SendResult:
        """Send a message after those already queued. An overflow drops the whole outbox."""
        if not self._outbox and self.try_send(frames):
            return SendResult.SENT
        if self._outbox.put(frames):
            return SendResult.QUEUED
        self.dropped += self._outbox.clear() + 1
        return SendResult.UNREACHABLE

    def try_send(self, frames: Sequence[Frame]) -> bool:
        """Hand a message to ZeroMQ, bypassing the outbox; False when there is no room or no connection."""
        sent = nonblocking.send(self.poll_handle, frames, zero_copy=self._options.zero_copy)
        if self.after_send is not None:
            self.after_send()
        return sent

    def flush(self) -> bool:
        """Send queued messages while there is room. True when the outbox is empty."""
        while self._outbox and self.try_send(self._outbox.first()):
            self._outbox.pop()
        return not self._outbox

    def discard(self) -> int:
        """Drop queued messages because their receiver has died. Returns how many."""
        dropped = self._outbox.clear()
        self.dropped += dropped
        return dropped

    def receive(self, limit: int = RECEIVE_BATCH) -> Iterator[list[Frame]]:
        """The messages available now, at most `limit`. A message that cannot be unpacked has no frames."""
        for message in nonblocking.receive(self.poll_handle, limit, zero_copy=self._options.zero_copy):
            try:
                yield unpack(message[0])
            except ValueError:
                yield []

    def close(self) -> None:
        """Close the socket and drop queued messages. May be called twice."""
        self._outbox.clear()
        self.after_send = None
        super().close()

    def check_invariants(self) -> None:
        self._outbox.check_invariants()

    def _disconnect(self) -> None:
        try:
            self.poll_handle.disconnect(self._address)
        except zmq.ZMQError as error:
            # ZeroMQ has already removed an inproc connection whose other end was closed.
            if error.errno != errno.ENOENT:
                raise
        self._address = ""
