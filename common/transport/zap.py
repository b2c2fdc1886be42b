"""The ZAP handler (RFC 27): ZeroMQ asks it about every peer that proved to have a key, and it answers. One per context.

A thread of its own, since a node has no loop that may be asked while it binds or waits. It keeps nothing but whom it
told of: pyzmq's ThreadAuthenticator would bring an event loop, and answers a stranger with 400 ("never again"), after
which ZeroMQ gives the connection up for good. Here the answer is 300, "not now": the peer goes on trying at its slowest
pace, and is in as soon as its key is listed.
"""

import logging
import threading
from collections.abc import Callable

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.transport import nonblocking as nowait
from kvferry.common.transport.nonblocking import RECEIVE_BATCH
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.waker import Wakeup

ENDPOINT = "inproc://zeromq.zap.01"
TOLD_MAX = 256
"""Strangers that are logged, once each; who makes a new key for every try must not fill a disk."""
_LOG = logging.getLogger("kvferry.security")
_VERSION = b"1.0"
_NUM_FRAMES = 7


class _Requests:
    def __init__(self, poll_handle: "zmq.Socket[bytes]") -> None:
        self.poll_handle = poll_handle


class ZapHandler:
    """Answers for all sockets of one ZeroMQ context, from `start` until `close`."""

    def __init__(self, admits: Callable[[str, bytes], bool]) -> None:
        """`admits` is asked with the domain and the 32 bytes of the key, on the handler's thread."""
        self._admits = admits
        self._wakeup = Wakeup()
        self._told: set[tuple[str, str]] = set()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Bind and answer from now on; when it returns, no connection can come too early."""
        if self._thread is not None:
            raise InvariantError("the ZAP handler was started already")
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(ENDPOINT)
        self._wakeup.open()
        self._thread = threading.Thread(target=self._run, args=(socket,), name="zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close its socket; before the context ends. Twice does no harm."""
        self._stopping = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._wakeup.close()

    def _run(self, socket: "zmq.Socket[bytes]") -> None:
        try:
            loop = PollLoop()
            loop.add(self._wakeup, self._wakeup.clear)
            loop.add(_Requests(socket), lambda: self._answer_all(socket))
            while not self._stopping:
                loop.run_once(None)
        finally:
            socket.close(linger=0)

    def _answer_all(self, socket: "zmq.Socket[bytes]") -> None:
        for request in nowait.receive(socket, RECEIVE_BATCH):
            nowait.send(socket, self._answer([bytes(frame) for frame in request]))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The reply: version, request id, status, text, user id, metadata."""
        number = request[1] if len(request) > 1 else b""
        if len(request) != _NUM_FRAMES or request[0] != _VERSION or request[5] != b"CURVE":
            return [_VERSION, number, b"500", b"not a CURVE request", b"", b""]
        domain, key = request[2].decode("ascii", "replace"), request[6]
        if self._admits(domain, key):
            self._told.discard((domain, key.hex()))
            return [_VERSION, number, b"200", b"OK", key.hex().encode(), b""]
        self._tell(domain, request[3].decode("ascii", "replace"), key.hex())
        return [_VERSION, number, b"300", b"key not allowed", b"", b""]

    def _tell(self, domain: str, address: str, key: str) -> None:
        if (domain, key) in self._told or len(self._told) >= TOLD_MAX:
            return
        self._told.add((domain, key))
        _LOG.warning("refused %s at the %s socket: its key %s is not allowed there", address or "a peer", domain, key)
        if len(self._told) == TOLD_MAX:
            _LOG.warning("%d strangers were refused; more are not told of", TOLD_MAX)
