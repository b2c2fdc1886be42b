"""The ZAP handler (RFC 27): answers ZeroMQ's question whether a peer with a proven key may connect. One per context.

It has its own thread, because a node has no loop that could answer while it binds or waits. pyzmq's
ThreadAuthenticator is not used: it needs an event loop, and it answers 400 for an unknown key, after which ZeroMQ gives
the connection up for good. This handler answers 300 (temporary failure): the peer keeps retrying at its slowest rate,
and is admitted as soon as its key is listed.
"""

import logging
import threading
from collections.abc import Callable

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.transport import nonblocking
from kvferry.common.transport.nonblocking import RECEIVE_BATCH
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.waker import Waker

ENDPOINT = "inproc://zeromq.zap.01"
MAX_LOGGED_PEERS = 256
"""Refused keys that are logged, once each: a peer that generates a new key for every attempt must not fill a disk."""
_LOG = logging.getLogger("kvferry.security")
_VERSION = b"1.0"
_NUM_FRAMES = 7


class _Requests:
    def __init__(self, poll_handle: "zmq.Socket[bytes]") -> None:
        self.poll_handle = poll_handle


class ZapHandler:
    """Answers for all sockets of one ZeroMQ context, from `start` to `close`."""

    def __init__(self, admits: Callable[[str, bytes], bool]) -> None:
        """`admits` is called with the domain and the 32 bytes of the key, on the handler's thread."""
        self._admits = admits
        self._waker = Waker()
        self._logged: set[tuple[str, str]] = set()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Bind and start answering. Sockets with keys may bind once it has returned."""
        if self._thread is not None:
            raise InvariantError("the ZAP handler is already started")
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(ENDPOINT)
        self._waker.open()
        self._thread = threading.Thread(target=self._run, args=(socket,), name="zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close its socket, before the context is terminated. May be called twice."""
        self._stopping = True
        self._waker.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._waker.close()

    def _run(self, socket: "zmq.Socket[bytes]") -> None:
        try:
            loop = PollLoop()
            loop.add(self._waker, self._waker.clear)
            loop.add(_Requests(socket), lambda: self._answer_all(socket))
            while not self._stopping:
                loop.run_once(None)
        finally:
            socket.close(linger=0)

    def _answer_all(self, socket: "zmq.Socket[bytes]") -> None:
        for request in nonblocking.receive(socket, RECEIVE_BATCH):
            nonblocking.send(socket, self._answer([bytes(frame) for frame in request]))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The reply: version, request id, status code, status text, user id, metadata."""
        request_id = request[1] if len(request) > 1 else b""
        if len(request) != _NUM_FRAMES or request[0] != _VERSION or request[5] != b"CURVE":
            return [_VERSION, request_id, b"500", b"not a CURVE request", b"", b""]
        domain, key = request[2].decode("ascii", "replace"), request[6]
        if self._admits(domain, key):
            self._logged.discard((domain, key.hex()))
            return [_VERSION, request_id, b"200", b"OK", key.hex().encode(), b""]
        self._log_refusal(domain, request[3].decode("ascii", "replace"), key.hex())
        return [_VERSION, request_id, b"300", b"key not allowed", b"", b""]

    def _log_refusal(self, domain: str, address: str, key: str) -> None:
        if (domain, key) in self._logged or len(self._logged) >= MAX_LOGGED_PEERS:
            return
        self._logged.add((domain, key))
        _LOG.warning(
            "refused %s at the %s socket: key %s is not in security.allowed_keys with a role that may connect there",
            address or "a peer",
            domain,
            key,
        )
        if len(self._logged) == MAX_LOGGED_PEERS:
            _LOG.warning("refused %d different keys; further refusals are not logged", MAX_LOGGED_PEERS)
