"""Sending and receiving one message without ever waiting. The only two places where sockets are read and written."""

from collections.abc import Iterator, Sequence

import zmq

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
