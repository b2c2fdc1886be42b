"""Non-blocking send and receive of one message, and the queue for messages that a peer has no room for.

All sockets of this package are read and written here only.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.protocol.wire import Frame

RECEIVE_BATCH = 1000
"""Messages received from a socket before its owner checks its timers again."""


def send(socket: "zmq.Socket[bytes]", frames: Sequence[Frame], *, zero_copy: bool = False) -> bool:
    """Hand a message to ZeroMQ; False when its queue is full. ZMQError for other errors, such as an unknown peer.

    ZeroMQ decides at the first frame: it accepts a message whole or not at all.
    """
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=not zero_copy)
    except zmq.Again:
        return False
    return True


def receive(socket: "zmq.Socket[bytes]", limit: int, *, zero_copy: bool = False) -> Iterator[list[Frame]]:
    """The messages available now, at most `limit`. With zero_copy, memoryviews that keep ZeroMQ's buffers alive.

    Reads ZMQ_EVENTS before each message, which also lets ZeroMQ process pending commands.
    """
    for _ in range(limit):
        if not readable(socket):
            return
        try:
            if zero_copy:
                yield [frame.buffer for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False)]
            else:
                yield list(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return


def readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message can be received. Reading ZMQ_EVENTS also lets ZeroMQ process pending commands."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def writable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message can be sent. Meaningful only for a socket with a single peer."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)


class SendResult(Enum):
    """The outcome of a send. No outcome guarantees delivery."""

    SENT = "sent"
    """ZeroMQ accepted it."""
    QUEUED = "queued"
    """The peer is full or not connected yet: the message is in the outbox, and `flush` retries it."""
    UNREACHABLE = "unreachable"
    """The peer is unknown, or its outbox overflowed: the message was dropped and the link counts as down."""


class Outbox:
    """A bounded FIFO of messages for one peer. Pure."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, Sequence[Frame]]] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Total size of the queued frames."""
        return self._num_bytes

    def put(self, frames: Sequence[Frame]) -> bool:
        """Append a message; False, without effect, when it would exceed a bound."""
        size = sum(map(len, frames))
        if len(self._waiting) >= self._max_messages or self._num_bytes + size > self._max_bytes:
            return False
        self._waiting.append((size, frames))
        self._num_bytes += size
        return True

    def first(self) -> Sequence[Frame]:
        """The oldest message; IndexError when the queue is empty."""
        return self._waiting[0][1]

    def pop(self) -> None:
        """Remove the oldest message, after it was sent."""
        size, _ = self._waiting.popleft()
        self._num_bytes -= size

    def clear(self) -> int:
        """Drop all messages; returns how many."""
        dropped = len(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return dropped

    def check_invariants(self) -> None:
        if self._num_bytes != sum(size for size, _ in self._waiting):
            raise InvariantError(f"outbox: byte count {self._num_bytes} differs from the size of its messages")
        if len(self._waiting) > self._max_messages or self._num_bytes > self._max_bytes:
            raise InvariantError("outbox: a bound is exceeded")
