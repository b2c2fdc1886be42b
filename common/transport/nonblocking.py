"""Sending and receiving one message without ever waiting. The only two places where sockets are read and written.

Messages that wait because a peer is full. Pure: knows no socket.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.protocol.wire import Frame

RECEIVE_BATCH = 1000
"""Messages taken from a socket before its owner looks at its timers again."""


def send(socket: "zmq.Socket[bytes]", frames: Sequence[Frame], *, zero_copy: bool = False) -> bool:
    """Give a message to ZeroMQ; False when it has no room. Other errors (no such peer) are raised as ZMQError.

    ZeroMQ decides at the first frame: a message is taken whole or not at all.
    """
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=not zero_copy)
    except zmq.Again:
        return False
    return True


def receive(socket: "zmq.Socket[bytes]", limit: int, *, zero_copy: bool = False) -> Iterator[list[Frame]]:
    """Messages that are there now, at most `limit`. With zero_copy as memoryviews that keep ZeroMQ's buffer alive.

    The socket is asked before each one: asking also lets it handle what its descriptor signalled.
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
    """Whether a message is there. Asking also lets the socket handle what its descriptor signalled."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def writable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether there is room for a message. Means something only for a socket with a single peer."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)


class SendResult(Enum):
    """What became of a message that was given to a socket. None of them promises that it arrives."""

    SENT = "sent"
    """ZeroMQ has it."""
    QUEUED = "queued"
    """The peer has no room (or is not connected yet): it waits here, and `flush` tries again."""
    UNREACHABLE = "unreachable"
    """There is no such peer, or its outbox overflowed: dropped, the link counts as down."""


class Outbox:
    """A bounded queue of messages for one peer, in order."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, Sequence[Frame]]] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames that wait."""
        return self._num_bytes

    def put(self, frames: Sequence[Frame]) -> bool:
        """Append a message; False, and nothing changes, when a bound would be passed."""
        size = sum(map(len, frames))
        if len(self._waiting) >= self._max_messages or self._num_bytes + size > self._max_bytes:
            return False
        self._waiting.append((size, frames))
        self._num_bytes += size
        return True

    def first(self) -> Sequence[Frame]:
        """The message that is sent next; IndexError when there is none."""
        return self._waiting[0][1]

    def pop(self) -> None:
        """Take the first away: it was sent."""
        size, _ = self._waiting.popleft()
        self._num_bytes -= size

    def clear(self) -> int:
        """Drop all; how many there were."""
        dropped = len(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return dropped

    def check_invariants(self) -> None:
        """The byte count is that of the messages, and both bounds hold."""
        if self._num_bytes != sum(size for size, _ in self._waiting):
            raise InvariantError(f"outbox: {self._num_bytes} bytes booked for messages of another size")
        if len(self._waiting) > self._max_messages or self._num_bytes > self._max_bytes:
            raise InvariantError("outbox: a bound is passed")
