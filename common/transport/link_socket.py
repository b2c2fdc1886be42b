"""A client's side of one link: a DEALER connected to one node. Never waits; owned by one thread or event loop.

With IMMEDIATE a message is given to ZeroMQ only while the connection stands, so what a dead life did not take is not
sent to the next life at the same address by ZeroMQ itself; what waits in the outbox is dropped by `discard`. What comes
in is one frame (`parcel.py`): with IMMEDIATE libzmq is not safe for more.
"""

import errno
from collections.abc import Callable, Iterator, Sequence

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import (
    Incarnation,
    routing_id,
)
from kvferry.common.config.endpoints import parse_endpoint
from kvferry.common.protocol.wire import Frame
from kvferry.common.transport import (
    nonblocking as nowait,
)
from kvferry.common.transport import (
    options,
)
from kvferry.common.transport.base_socket import OwnSocket
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.framing import unpack
from kvferry.common.transport.nonblocking import (
    RECEIVE_BATCH,
    Outbox,
    SendResult,
)
from kvferry.common.transport.options import SocketOptions


class LinkSocket(OwnSocket):
    """Sends to and receives from the node at one endpoint. `open`, `connect`, ..., `close`."""

    WHAT = "the link"

    def __init__(self, context: TransportContext, own: Incarnation, socket_options: SocketOptions) -> None:
        super().__init__(context)
        self._own = own
        self._options = socket_options
        self._endpoint = ""
        self._address = ""
        self._outbox = Outbox(socket_options.outbox_messages, socket_options.outbox_bytes)
        self.dropped = 0
        """Messages that an overflow or `discard` threw away."""
        self.after_send: Callable[[], None] | None = None
        """Called when something was given to the socket: that may have used up the descriptor's signal."""

    def open(self) -> None:
        """Make the socket. A monitor is attached between this and `connect`."""
        self._demand_new()
        socket = self._context.open_socket(zmq.DEALER, "link socket")
        options.apply(socket, self._options)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.ROUTING_ID, routing_id(self._own))
        self._socket = socket

    def connect(self, endpoint: str) -> None:
        """Start to connect; ZeroMQ goes on trying. ConfigError when it is no address to connect to."""
        if self._address:
            raise InvariantError(f"the link is connected to {self._endpoint} already")
        self._address = options.connect(self._context, self.poll_handle, endpoint, self._options)
        self._endpoint = endpoint

    def reconnect(self) -> None:
        """Drop what waits and make sure that a connection is tried: called when the life at the other end is over.

        ZeroMQ goes on trying by itself, but not over `inproc`: there the link connects anew.
        """
        self.discard()
        if parse_endpoint(self._endpoint).scheme == "inproc":
            self._disconnect()
            self.connect(self._endpoint)

    @property
    def endpoint(self) -> str:
        """What it was connected to, as it was given."""
        return self._endpoint

    @property
    def has_pending(self) -> bool:
        """Whether the outbox is not empty: `flush` again soon."""
        return bool(self._outbox)

    def writable(self) -> bool:
        """Whether the connection stands and has room for a message."""
        return nowait.writable(self.poll_handle)

    def send(self, frames: Sequence[Frame]) -> SendResult:
        """Send a message, after all that waits already. An overflow drops everything that waits."""
        if not self._outbox and self.try_send(frames):
            return SendResult.SENT
        if self._outbox.put(frames):
            return SendResult.QUEUED
        self.dropped += self._outbox.clear() + 1
        return SendResult.UNREACHABLE

    def try_send(self, frames: Sequence[Frame]) -> bool:
        """Give a message to ZeroMQ past the outbox; False when there is no room or no connection."""
        sent = nowait.send(self.poll_handle, frames, zero_copy=self._options.zero_copy)
        if self.after_send is not None:
            self.after_send()
        return sent

    def flush(self) -> bool:
        """Send what waits, as far as there is room; whether nothing waits any more."""
        while self._outbox and self.try_send(self._outbox.first()):
            self._outbox.pop()
        return not self._outbox

    def discard(self) -> int:
        """Drop what waits: the life it was meant for is over. Returns how many messages that were."""
        dropped = self._outbox.clear()
        self.dropped += dropped
        return dropped

    def receive(self, limit: int = RECEIVE_BATCH) -> Iterator[list[Frame]]:
        """Messages that are there now, at most `limit`. One that is no parcel has no frames."""
        for message in nowait.receive(self.poll_handle, limit, zero_copy=self._options.zero_copy):
            try:
                yield unpack(message[0])
            except ValueError:
                yield []

    def close(self) -> None:
        """Close the socket and drop what waits. Twice does no harm."""
        self._outbox.clear()
        self.after_send = None
        super().close()

    def check_invariants(self) -> None:
        """The outbox keeps its bounds."""
        self._outbox.check_invariants()

    def _disconnect(self) -> None:
        try:
            self.poll_handle.disconnect(self._address)
        except zmq.ZMQError as error:
            # An inproc connection whose other end closed is forgotten by ZeroMQ already.
            if error.errno != errno.ENOENT:
                raise
        self._address = ""
