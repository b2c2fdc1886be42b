"""Who exists: nodes tell every router host's proxy, router workers hear it from the proxy of their own host.

Says nothing about whether a node lives. Losing a proxy, or the name service, freezes what is known; nothing here
takes a node away.
"""

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace

import zmq

from kvferry.common.base.clock import (
    Clock,
    MonotonicClock,
)
from kvferry.common.base.errors import (
    ConfigError,
    InvariantError,
    ProtocolError,
)
from kvferry.common.config.endpoints import parse_endpoint, with_key
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Announce, Envelope
from kvferry.common.protocol.wire import decode, encode
from kvferry.common.transport import (
    nonblocking as nowait,
)
from kvferry.common.transport import (
    options,
)
from kvferry.common.transport.base_socket import OwnSocket
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.monitor import ConnectionEvent, LinkMonitor
from kvferry.common.transport.nonblocking import RECEIVE_BATCH
from kvferry.common.transport.options import SocketOptions
from kvferry.common.transport.security_domain import Channel

_LOG = logging.getLogger("kvferry.announce")
FAILURES_TOLD = 3
"""Handshakes that fail in a row until it is told, once."""
ANNOUNCE_OPTIONS = SocketOptions(channel=Channel.ANNOUNCE, high_water=1000, max_frame_bytes=65_536)
"""Between nodes and the proxy."""
MEMBERS_OPTIONS = replace(ANNOUNCE_OPTIONS, channel=Channel.MEMBERS)
"""Between the proxy and the workers of its host."""

Resolve = Callable[[str], list[str]]
"""An endpoint -> all endpoints that it stands for. Raises OSError when the name cannot be resolved now."""


def resolve_endpoint(endpoint: str) -> list[str]:
    """All addresses behind a tcp endpoint's host name, sorted; any other endpoint as it is. Asks the name service."""
    parsed = parse_endpoint(endpoint)
    if parsed.scheme != "tcp":
        return [endpoint]
    found = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    texts = [f"tcp://[{host}]:{parsed.port}" if ":" in host else f"tcp://{host}:{parsed.port}" for host in hosts]
    return [with_key(text, parsed.key) for text in texts] if parsed.key else texts


class _Publisher:
    """The socket of an announcer, as a monitor wants it."""

    def __init__(self, poll_handle: "zmq.Socket[bytes]") -> None:
        self.poll_handle = poll_handle

    @property
    def is_open(self) -> bool:
        return not self.poll_handle.closed


class Announcer:
    """Repeats one announcement to every proxy. Has a thread of its own, since asking for a name may take seconds."""

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
        """Connections that ZeroMQ gave up, for the proxy there had no keys (or was none), and that were made anew."""
        self._renewed = 0

    def start(self, announcement: Envelope) -> None:
        """Announce it from now on. ConfigError when a proxy's endpoint is none, ProtocolError when it is too large."""
        for proxy in self._proxies:
            options.check_connectable(self._context, proxy, Channel.ANNOUNCE)
        self.change(announcement)
        if self._thread is not None:
            raise InvariantError("the announcer was started already")
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def change(self, announcement: Envelope) -> None:
        """Announce this from now on (another life after a turned role, say). From any thread."""
        self._frames = [bytes(frame) for frame in encode(announcement, self._limits)]

    def close(self) -> None:
        """Stop and wait for the thread, for as long as a name that is being asked for takes. Twice does no harm."""
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
                nowait.send(publisher, self._frames)
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
            if self._failures == FAILURES_TOLD:
                _LOG.warning("a proxy of discovery.announce_to is there and no handshake succeeds: %s", self._reason())

    def _reason(self) -> str:
        if self._context.security is None:
            return "it does not answer, has keys and this node has none, or is no proxy"
        return "it does not answer, does not let this node's key in, runs without keys, or is not who its key says"

    def _reconnect(self, publisher: "zmq.Socket[bytes]") -> None:
        if self.given_up != self._renewed:
            self._renewed = self.given_up
            self._disconnect(publisher, self._connected.keys())  # an announcement that is lost comes again
        for proxy in self._proxies:
            try:
                self._resolved[proxy] = self._resolve(proxy)
            except OSError:
                continue  # what was known before goes on
        wanted = {endpoint for endpoints in self._resolved.values() for endpoint in endpoints}
        for endpoint in wanted - self._connected.keys():
            try:
                self._connected[endpoint] = options.connect(self._context, publisher, endpoint, ANNOUNCE_OPTIONS)
            except ConfigError as error:  # its key was taken out of the list; it may come back
                _LOG.warning("%s", error)
        self._disconnect(publisher, self._connected.keys() - wanted)

    def _disconnect(self, publisher: "zmq.Socket[bytes]", endpoints: Set[str]) -> None:
        for endpoint in list(endpoints):
            try:
                publisher.disconnect(self._connected.pop(endpoint))
            except zmq.ZMQError as error:
                if error.errno != errno.ENOENT:  # one that ZeroMQ gave up is forgotten by it
                    raise


class AnnouncementListener(OwnSocket):
    """Hears announcements from one proxy. Never waits; owned by one thread or event loop (through AsyncReceiver)."""

    WHAT = "the listener"

    def __init__(self, context: TransportContext, limits: Limits) -> None:
        super().__init__(context)
        self._limits = limits
        self.malformed = 0
        """Messages dropped since they were no announcement of this protocol version."""

    def connect(self, endpoint: str) -> None:
        """Start to listen to the proxy's endpoint for workers."""
        self._demand_new()
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
        """Announcements that are there now; the message of each envelope is an `Announce`."""
        for frames in nowait.receive(self.poll_handle, limit):
            try:
                envelope = decode(frames, self._limits)
            except ProtocolError:
                self.malformed += 1
                continue
            if isinstance(envelope.message, Announce):
                yield envelope
            else:
                self.malformed += 1
