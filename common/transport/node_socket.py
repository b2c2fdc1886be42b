"""A node's end of all links to it: one bound ROUTER. Never blocks; owned by one thread. A sent message is one frame.

A peer is identified by its incarnation, which is its routing id. A peer that reconnects under the same id replaces its
old connection. Keys, if configured, prove that a peer is a node or a router; they do not prove its incarnation.
"""

import errno
from collections import Counter
from collections.abc import Iterator, Sequence

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation, routing_id
from kvferry.common.protocol.wire import Frame
from kvferry.common.transport import nonblocking, options
from kvferry.common.transport.base_socket import BaseSocket
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.framing import pack
from kvferry.common.transport.nonblocking import RECEIVE_BATCH, Outbox, SendResult
from kvferry.common.transport.options import SocketOptions

_INCARNATION_BYTES = 16


class NodeSocket(BaseSocket):
    """Sends to any connected peer, receives from all. Call `bind` first and `close` last, on the owning thread."""

    WHAT = "the node socket"

    def __init__(self, context: TransportContext, socket_options: SocketOptions) -> None:
        super().__init__(context)
        self._options = socket_options
        self._outboxes: dict[Incarnation, Outbox] = {}
        self._name = ""
        """The bound `inproc` endpoint, or empty."""
        self.dropped: Counter[str] = Counter()
        """Dropped messages: `overflow` and `unreachable` (to peers), `no_incarnation` (from peers)."""

    def bind(self, endpoint: str, *, allow_remote: bool = False) -> str:
        """Bind, and return the endpoint with its real port. ConfigError when that is not permitted or fails."""
        self._require_closed()
        socket = self._context.open_socket(zmq.ROUTER, f"node socket at {endpoint}")
        try:
            options.apply(socket, self._options)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            bound = options.bind(self._context, socket, endpoint, self._options, allow_remote=allow_remote)
        except BaseException:
            self._context.close_socket(socket)
            raise
        self._socket, self._name = socket, bound if bound.startswith("inproc://") else ""
        return bound

    @property
    def has_pending(self) -> bool:
        """Whether any outbox holds messages, so that `flush` must be called."""
        return bool(self._outboxes)

    def send(self, peer: Incarnation, frames: Sequence[Frame]) -> SendResult:
        """Send a message to a peer after those already queued for it."""
        outbox = self._outboxes.get(peer)
        if outbox is not None:
            return self._queue(peer, outbox, frames)
        try:
            if self._try_send(peer, frames):
                return SendResult.SENT
        except ConnectionError:
            self.dropped["unreachable"] += 1
            return SendResult.UNREACHABLE
        return self._queue(peer, Outbox(self._options.outbox_messages, self._options.outbox_bytes), frames)

    def flush(self) -> list[Incarnation]:
        """Send queued messages while there is room. Returns the peers that are gone; their outboxes are dropped."""
        gone = []
        for peer, outbox in list(self._outboxes.items()):
            try:
                while outbox and self._try_send(peer, outbox.first()):
                    outbox.pop()
            except ConnectionError:
                self.dropped["unreachable"] += self.forget(peer)
                gone.append(peer)
                continue
            if not outbox:
                del self._outboxes[peer]
        return gone

    def forget(self, peer: Incarnation) -> int:
        """Drop the outbox of a peer, for example a dead one; returns the number of messages."""
        outbox = self._outboxes.pop(peer, None)
        return outbox.clear() if outbox is not None else 0

    def receive(self, limit: int = RECEIVE_BATCH) -> Iterator[tuple[Incarnation, list[Frame]]]:
        """The messages available now, at most `limit`, each with its sender's incarnation."""
        for frames in nonblocking.receive(self.poll_handle, limit, zero_copy=self._options.zero_copy):
            if len(frames[0]) != _INCARNATION_BYTES:
                self.dropped["no_incarnation"] += 1
                continue
            yield Incarnation(bytes(frames[0]).hex()), frames[1:]

    def close(self) -> None:
        """Close the socket and drop queued messages. May be called twice."""
        self._outboxes.clear()
        if self._socket is not None and self._name:
            self._socket.unbind(self._name)  # close alone would free the name later, in a thread of libzmq
        super().close()

    def check_invariants(self) -> None:
        for peer, outbox in self._outboxes.items():
            outbox.check_invariants()
            if not outbox:
                raise InvariantError(f"the outbox of {peer} is empty")

    def _queue(self, peer: Incarnation, outbox: Outbox, frames: Sequence[Frame]) -> SendResult:
        if outbox.put(frames):
            self._outboxes[peer] = outbox
            return SendResult.QUEUED
        self.dropped["overflow"] += self.forget(peer) + 1
        return SendResult.UNREACHABLE

    def _try_send(self, peer: Incarnation, frames: Sequence[Frame]) -> bool:
        """False when the peer is full; ConnectionError when it is unknown."""
        try:
            return nonblocking.send(self.poll_handle, [routing_id(peer), pack(frames)])
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                raise ConnectionError(peer) from None
            raise
