"""Node discovery: nodes announce themselves to the proxy of every router host, and that proxy informs its workers.

Discovery only adds nodes. It does not detect dead ones, and losing a proxy or the name service removes none.
"""

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace

import zmq

from kvferry.common.base.clock import Clock, MonotonicClock
from kvferry.common.base.errors import ConfigError, InvariantError, ProtocolError
from kvferry.common.config.endpoints import parse_endpoint, with_key
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Announce, Envelope
from kvferry.common.protocol.wire import decode, encode
from kvferry.common.transport import nonblocking, options
from kvferry.common.transport.base_socket import BaseSocket
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.monitor import (
    HANDSHAKE_FAILURES_BEFORE_WARNING,
    ConnectionEvent,
    LinkMonitor,
    handshake_advice,
)
from kvferry.common.transport.nonblocking import RECEIVE_BATCH
from kvferry.common.transport.options import SocketOptions
from kvferry.common.transport.security_domain import SecurityDomain

_LOG = logging.getLogger("kvferry.announce")

ANNOUNCE_OPTIONS = SocketOptions(domain=SecurityDomain.ANNOUNCE, high_water=1000, max_frame_bytes=65_536)
"""Between nodes and the proxy."""
MEMBERS_OPTIONS = replace(ANNOUNCE_OPTIONS, domain=SecurityDomain.MEMBERS)
"""Between the proxy and the workers of its host."""

Resolve = Callable[[str], list[str]]
"""An endpoint -> the endpoints of all its addresses. Raises OSError when the name cannot be resolved now."""


def resolve_endpoint(endpoint: str) -> list[str]:
    """All addresses of a tcp endpoint's host name, sorted; any other endpoint unchanged. Queries the name service."""
    parsed = parse_endpoint(endpoint)
    if parsed.scheme != "tcp":
        return [endpoint]
    found = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    texts = [f"tcp://[{host}]:{parsed.port}" if ":" in host else f"tcp://{host}:{parsed.port}" for host in hosts]
    return [with_key(text, parsed.key) for text in texts] if parsed.key else texts


class _Publisher:
    """The announcer's socket as a LinkMonitor expects it."""

    def __init__(self, poll_handle: "zmq.Socket[bytes]") -> None:
        self.poll_handle = poll_handle

    @property
    def is_open(self) -> bool:
        return not self.poll_handle.closed


class Announcer:
    """Repeats one announcement to every proxy, in its own thread: resolving a name may take seconds."""

    def __init__(
        self,
        context: TransportContext,
        proxies: Sequence[str],
        timers: Timers,
        limits: Limits,
        *,
        resolve: Resolve = resolve_endpoint,
        clock: Clock | None = None,
    ) -> None:
        self._context = context
        self._proxies = tuple(proxies)
        self._timers = timers
        self._limits = limits
        self._resolve = resolve
        self._clock = clock or MonotonicClock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._frames: list[bytes] = []
        self._connected: dict[str, str] = {}
        self._resolved: dict[str, list[str]] = {}
        self._failures = 0
        self.given_up = 0
        """Connections that ZeroMQ gave up because the proxy has no keys or is not a proxy. They are replaced."""
        self._replaced = 0

    def start(self, announcement: Envelope) -> None:
        """Start to announce. ConfigError when a proxy's endpoint is invalid, ProtocolError when `announcement` is too
        large."""
        for proxy in self._proxies:
            options.check_connectable(self._context, proxy, SecurityDomain.ANNOUNCE)
        self.change(announcement)
        if self._thread is not None:
            raise InvariantError("the announcer is already started")
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def change(self, announcement: Envelope) -> None:
        """Replace the announcement, for example by a new incarnation after a change of role. Thread-safe."""
        self._frames = [bytes(frame) for frame in encode(announcement, self._limits)]

    def close(self) -> None:
        """Stop and join the thread; blocks while it resolves a name. May be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        publisher = self._context.open_socket(zmq.PUB, "announcer")
        monitor = LinkMonitor(self._context, _Publisher(publisher))
        try:
            options.apply(publisher, ANNOUNCE_OPTIONS)
            monitor.open()
            resolve_at = self._clock.now()
            while not self._stop.is_set():
                for event in monitor.receive():
                    self._on_monitor(event)
                if self._clock.now() >= resolve_at:
                    self._reconnect(publisher)
                    resolve_at = self._clock.now() + self._timers.resolve_s
                nonblocking.send(publisher, self._frames)
                self._stop.wait(self._timers.heartbeat_s)
        finally:
            monitor.close()
            self._context.close_socket(publisher)

    def _on_monitor(self, event: ConnectionEvent) -> None:
        self.given_up += event is ConnectionEvent.GAVE_UP
        if event is ConnectionEvent.CONNECTED:
            self._failures = 0
        elif event is not ConnectionEvent.DISCONNECTED:
            self._failures += 1
            if self._failures == HANDSHAKE_FAILURES_BEFORE_WARNING:
                _LOG.warning(
                    "a proxy in discovery.announce_to accepts connections but the handshake fails; %s",
                    handshake_advice(self._context, "proxy"),
                )

    def _reconnect(self, publisher: "zmq.Socket[bytes]") -> None:
        if self.given_up != self._replaced:
            self._replaced = self.given_up
            self._disconnect(publisher, self._connected.keys())  # a lost announcement is repeated
        for proxy in self._proxies:
            try:
                self._resolved[proxy] = self._resolve(proxy)
            except OSError:
                continue  # keep the addresses known so far
        wanted = {endpoint for endpoints in self._resolved.values() for endpoint in endpoints}
        for endpoint in wanted - self._connected.keys():
            try:
                self._connected[endpoint] = options.connect(self._context, publisher, endpoint, ANNOUNCE_OPTIONS)
            except ConfigError as error:  # its key is not in security.allowed_keys; it may be added later
                _LOG.warning("%s", error)
        self._disconnect(publisher, self._connected.keys() - wanted)

    def _disconnect(self, publisher: "zmq.Socket[bytes]", endpoints: Set[str]) -> None:
        for endpoint in list(endpoints):
            try:
                publisher.disconnect(self._connected.pop(endpoint))
            except zmq.ZMQError as error:
                if error.errno != errno.ENOENT:  # ZeroMQ has already removed a connection that it gave up
                    raise


class AnnouncementListener(BaseSocket):
    """Receives announcements from one proxy. Never blocks; owned by one thread or event loop (see AsyncReceiver)."""

    WHAT = "the announcement listener"

    def __init__(self, context: TransportContext, limits: Limits) -> None:
        super().__init__(context)
        self._limits = limits
        self.malformed = 0
        """Messages dropped because they were not announcements of this protocol version."""

    def connect(self, endpoint: str) -> None:
        """Connect to the proxy's endpoint for workers."""
        self._require_closed()
        subscriber = self._context.open_socket(zmq.SUB, "announcement listener")
        try:
            options.apply(subscriber, ANNOUNCE_OPTIONS)
            options.connect(self._context, subscriber, endpoint, MEMBERS_OPTIONS)
            subscriber.subscribe(b"")
        except BaseException:
            self._context.close_socket(subscriber)
            raise
        self._socket = subscriber

    def receive(self, limit: int = RECEIVE_BATCH) -> Iterator[Envelope]:
        """The announcements available now; the message of each envelope is an `Announce`."""
        for frames in nonblocking.receive(self.poll_handle, limit):
            try:
                envelope = decode(frames, self._limits)
            except ProtocolError:
                self.malformed += 1
                continue
            if isinstance(envelope.message, Announce):
                yield envelope
            else:
                self.malformed += 1
