"""The process' ZeroMQ context and the register of its open sockets. Passed as an argument, never a global.

`inproc://` endpoints connect only within one context, and a context per use would leak descriptors. So each process has
one, created after the fork. Every socket is opened and closed through it, and open ones can be listed. It also holds
the keys, because ZeroMQ authenticates per context.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator

import zmq

from kvferry.common.base.errors import InvariantError, OutOfSocketsError
from kvferry.common.transport.security import Security
from kvferry.common.transport.security_domain import SecurityDomain
from kvferry.common.transport.zap import ZapHandler

_LOG = logging.getLogger("kvferry.security")

MAX_SOCKETS = 16384
"""A router worker holds a socket per node; ZeroMQ's own default of 1023 is too few for a large cluster."""


@contextlib.contextmanager
def raising_out_of_sockets(description: str) -> Iterator[None]:
    """Turn ZeroMQ's errors about missing descriptors or sockets into OutOfSocketsError."""
    try:
        yield
    except zmq.ZMQError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise OutOfSocketsError(description, error.strerror) from None


class TransportContext:
    """Opens and closes sockets; thread-safe. Each socket belongs to the thread that uses it."""

    def __init__(self, security: Security | None = None, *, io_threads: int = 1) -> None:
        self.security = security
        self._io_threads = io_threads
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._owner_pid = 0
        self._zap: ZapHandler | None = None
        self._warned_exposed = False
        self._open: dict[zmq.Socket[bytes], str] = {}
        self._files: dict[zmq.Socket[bytes], tuple[str, int]] = {}

    def open_socket(self, kind: int, description: str) -> "zmq.Socket[bytes]":
        """A new socket with LINGER 0. `description` names it in errors and leak reports."""
        with self._lock:
            if self._context is None:
                self._context = zmq.Context(io_threads=self._io_threads)
                self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
                self._owner_pid = os.getpid()
            elif self._owner_pid != os.getpid():
                raise InvariantError("a ZeroMQ context does not survive a fork: create it in the child")
            with raising_out_of_sockets(description):
                socket = self._context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            self._open[socket] = description
            return socket

    def prepare_zero_copy(self) -> None:
        """Send one large frame within the process, so that pyzmq creates its thread for freeing large frames now.

        That thread has a context of its own. Created later, its descriptors would look like a leak.
        """
        one, other = (self.open_socket(zmq.PAIR, "the first large frame") for _ in range(2))
        try:
            # A new name each time: nodes of one process start concurrently, and ZeroMQ frees a name with a delay.
            place = f"inproc://first-large-frame-{os.urandom(8).hex()}"
            one.bind(place)
            other.connect(place)
            one.send(bytes(2 * zmq.COPY_THRESHOLD), copy=False)
            other.recv()
        finally:
            self.close_socket(other)
            self.close_socket(one)

    def close_socket(self, socket: "zmq.Socket[bytes]") -> None:
        """Close a socket and drop its unsent messages. Call it on the owning thread; may be called twice."""
        with self._lock:
            self._open.pop(socket, None)
            file = self._files.pop(socket, None)
        socket.close(linger=0)
        if file is not None and _inode(file[0]) == file[1]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file[0])

    def secure_server(self, socket: "zmq.Socket[bytes]", domain: SecurityDomain) -> None:
        """Set keys on a socket that will bind. Starts the ZAP handler before the first such socket binds."""
        if self.security is None:
            raise InvariantError("this context has no keys")
        self.security.secure_server(socket, domain)
        with self._lock:
            if self._zap is None and self._context is not None:
                self._zap = ZapHandler(self.security.admits)
                self._zap.start(self._context)

    def warn_exposed(self, endpoint: str) -> None:
        """Log, once per context, that sockets without keys are reachable from other hosts."""
        if not self._warned_exposed:
            self._warned_exposed = True
            _LOG.warning(
                "%s is reachable from other hosts and has NO KEYS: any host that reaches it, or another such socket of "
                "this process, can read prompts, write KV and end requests. Configure [security], or let only the "
                "cluster's hosts through the firewall",
                endpoint,
            )

    def track_ipc_file(self, socket: "zmq.Socket[bytes]", path: str) -> None:
        """Unlink this path, bound over `ipc`, when the socket closes, unless another process has bound it since.

        ZeroMQ leaves the file.
        """
        inode = _inode(path)
        if inode is not None:
            with self._lock:
                self._files[socket] = path, inode

    def open_sockets(self) -> tuple[str, ...]:
        """Descriptions of all open sockets; empty when none has leaked."""
        with self._lock:
            return tuple(self._open.values())

    def close(self) -> None:
        """Terminate the context. InvariantError when a socket is still open: terminating would block for ever."""
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
        with self._lock:
            if closed := [name for socket, name in self._open.items() if socket.closed]:
                raise InvariantError(f"closed without close_socket: {', '.join(closed)}")
            if self._open and self._context is None:
                raise InvariantError("sockets are open without a context")
            if self._files.keys() - self._open.keys():
                raise InvariantError("an ipc file is tracked for a closed socket")


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None
