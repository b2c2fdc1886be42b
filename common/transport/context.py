"""The one ZeroMQ context of a process, and the register of the sockets on it. Handed around, never a global.

`inproc://` endpoints meet only on the same context. A context per use would leak descriptors, so there is one, made
after the fork; every socket is opened and closed through it, and what is still open can be listed. Keys belong to it,
since ZeroMQ asks about them context by context.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator

import zmq

from kvferry.common.base.errors import (
    InvariantError,
    OutOfSocketsError,
)
from kvferry.common.transport.security import Security
from kvferry.common.transport.security_domain import Channel
from kvferry.common.transport.zap import ZapHandler

_LOG = logging.getLogger("kvferry.security")

MAX_SOCKETS = 16384
"""A router worker holds a socket per node; ZeroMQ's own default of 1023 is too few for a large cluster."""


@contextlib.contextmanager
def making(description: str) -> Iterator[None]:
    """What ZeroMQ cannot make in here for want of a descriptor, or of a socket of its own, is an OutOfSocketsError."""
    try:
        yield
    except zmq.ZMQError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise OutOfSocketsError(description, error.strerror) from None


class TransportContext:
    """Opens and closes sockets; thread-safe. The sockets themselves belong to the thread that uses them."""

    def __init__(self, security: Security | None = None, *, io_threads: int = 1) -> None:
        self.security = security
        self._io_threads = io_threads
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._owner_pid = 0
        self._zap: ZapHandler | None = None
        self._told_exposed = False
        self._open: dict[zmq.Socket[bytes], str] = {}
        self._files: dict[zmq.Socket[bytes], tuple[str, int]] = {}

    def open_socket(self, kind: int, description: str) -> "zmq.Socket[bytes]":
        """A new socket that never lingers. `description` names it in leak reports."""
        with self._lock:
            if self._context is None:
                self._context = zmq.Context(io_threads=self._io_threads)
                self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
                self._owner_pid = os.getpid()
            elif self._owner_pid != os.getpid():
                raise InvariantError("a ZeroMQ context does not survive a fork: make it in the child")
            with making(description):
                socket = self._context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            self._open[socket] = description
            return socket

    def prepare_zero_copy(self) -> None:
        """pyzmq frees large frames by a thread with a context of its own, made at the first of them. Made at the start
        instead, descriptors do not grow later, as a leak's would."""
        one, other = (self.open_socket(zmq.PAIR, "the first large frame") for _ in range(2))
        try:
            # A new name each time: nodes of one process start at once, and ZeroMQ lets go of a name a little late.
            place = f"inproc://first-large-frame-{os.urandom(8).hex()}"
            one.bind(place)
            other.connect(place)
            one.send(bytes(2 * zmq.COPY_THRESHOLD), copy=False)
            other.recv()
        finally:
            self.close_socket(other)
            self.close_socket(one)

    def close_socket(self, socket: "zmq.Socket[bytes]") -> None:
        """Close it, dropping what it still had to send. Called by the thread that owns it; twice does no harm."""
        with self._lock:
            self._open.pop(socket, None)
            file = self._files.pop(socket, None)
        socket.close(linger=0)
        if file is not None and _inode(file[0]) == file[1]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file[0])

    def secure_server(self, socket: "zmq.Socket[bytes]", channel: Channel) -> None:
        """Put keys on a socket that will bind. The handler that lets peers in runs before the first one does."""
        if self.security is None:
            raise InvariantError("this context has no keys")
        self.security.secure_server(socket, channel)
        with self._lock:
            if self._zap is None and self._context is not None:
                self._zap = ZapHandler(self.security.admits)
                self._zap.start(self._context)

    def tell_exposed(self, endpoint: str) -> None:
        """Say, once, that whoever reaches a socket here may speak to it."""
        if not self._told_exposed:
            self._told_exposed = True
            _LOG.warning(
                "%s and all else here that is bound beyond loopback has NO KEYS: whoever reaches it can read prompts, "
                "write KV and end requests. Configure [security], or let only your own hosts reach it",
                endpoint,
            )

    def own_file(self, socket: "zmq.Socket[bytes]", path: str) -> None:
        """`ipc` bound this path: it goes with the socket (ZeroMQ leaves it), unless another life has it by then."""
        inode = _inode(path)
        if inode is not None:
            with self._lock:
                self._files[socket] = path, inode

    def open_sockets(self) -> tuple[str, ...]:
        """Descriptions of all sockets that are open now; empty when nothing leaked."""
        with self._lock:
            return tuple(self._open.values())

    def close(self) -> None:
        """End the context. InvariantError when a socket is still open: ending would wait for it for ever."""
        with self._lock:
            if self._open:
                raise InvariantError(f"sockets are still open: {', '.join(sorted(self._open.values()))}")
            context, self._context = self._context, None
            zap, self._zap = self._zap, None
        if zap is not None:
            zap.close()
        if context is not None:
            context.term()

    def check_invariants(self) -> None:
        """Nothing is registered as open that is closed, and nothing is open without a context."""
        with self._lock:
            if closed := [name for socket, name in self._open.items() if socket.closed]:
                raise InvariantError(f"closed behind the register's back: {', '.join(closed)}")
            if self._open and self._context is None:
                raise InvariantError("sockets without a context")
            if self._files.keys() - self._open.keys():
                raise InvariantError("a file outlives its socket")


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None
