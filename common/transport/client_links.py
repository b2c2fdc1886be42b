"""The client sockets of one process: a link and its monitor for each node that its core asked for. Decides nothing.

Used by router workers (in an asyncio loop) and prefill nodes (in a poll loop); how a source is watched and how an
address is probed is handed in.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvferry.common.base.errors import (
    ConfigError,
    OutOfSocketsError,
    ProtocolError,
)
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.events import (
    Event,
    LinkClosed,
    LinkConnected,
    ProbeAnswered,
    Received,
)
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Envelope, Message
from kvferry.common.protocol.wire import Frame, decode, encode
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.monitor import ConnectionEvent, LinkMonitor, connect_watched
from kvferry.common.transport.nonblocking import SendResult
from kvferry.common.transport.options import SocketOptions
from kvferry.common.transport.probe import ProbeResult

PROBE_TIMEOUT_S = 1.0
FAILURES_TOLD = 3
"""Handshakes that fail in a row until it is told, once: a process that ends may leave one."""

T = TypeVar("T")
Close = Callable[[], None]


class Watcher(Protocol):
    """The surroundings of the sockets: one loop, and a way to probe without stopping it."""

    def watch_link(self, link: LinkSocket, on_message: Callable[[list[Frame]], None]) -> Close:
        """Call back with each message of an open link, until the returned function is called."""
        ...

    def watch_monitor(self, monitor: LinkMonitor, on_event: Callable[[ConnectionEvent], None]) -> Close:
        """Call back with each connection event."""
        ...

    def probe(self, endpoint: str, timeout_s: float, on_result: Callable[[ProbeResult], None]) -> None:
        """Find out whether anything listens there; call back in the loop."""
        ...


@dataclass(slots=True)
class _Open:
    link: LinkSocket
    monitor: LinkMonitor
    closers: tuple[Close, Close]
    gave_up: bool = False
    """ZeroMQ does not try again."""
    due: bool = False
    """Whoever is wanted there was called in vain: time for a new link."""


class ClientLinks:
    """Opens, closes and uses links; what comes in is given to `on_event`. Belongs to one loop."""

    def __init__(
        self,
        context: TransportContext,
        own: Incarnation,
        limits: Limits,
        timers: Timers,
        watcher: Watcher,
        on_event: Callable[[Event], None],
        log: logging.Logger,
    ) -> None:
        self._context = context
        self._own = own
        self._limits = limits
        self._options = SocketOptions.control(limits, timers)
        self._watcher = watcher
        self._on_event = on_event
        self._log = log
        self._open: dict[str, _Open] = {}
        self._failures: Counter[str] = Counter()
        """Handshakes that failed since the last that did not."""
        self._unconnected: dict[str, str] = {}
        """Wanted, and without a link: what there was to say about it."""
        self._endpoint_of: dict[Incarnation, str] = {}
        self.malformed = 0
        """Messages dropped since they broke the protocol."""

    def open(self, endpoint: str) -> None:
        """Make a link to this endpoint. A wrong address is logged, not raised: it came from another process.

        A key that is not allowed may be soon, and so may a descriptor be free: each Hello tries again.
        """
        link = LinkSocket(self._context, self._own, self._options)
        monitor = LinkMonitor(self._context, link)
        try:
            connect_watched(link, monitor, endpoint)
        except (ConfigError, OutOfSocketsError) as error:
            if self._unconnected.get(endpoint) != str(error):
                self._log.warning("%s", error)
            self._unconnected[endpoint] = str(error)
            return
        self._unconnected.pop(endpoint, None)
        closers = (
            self._watcher.watch_link(link, lambda frames: self._on_frames(endpoint, frames)),
            self._watcher.watch_monitor(monitor, lambda event: self._on_monitor(endpoint, event)),
        )
        self._open[endpoint] = _Open(link, monitor, closers)

    def reset(self, endpoint: str) -> None:
        """Drop what waits for the life that ended there, and connect anew."""
        if (found := self._open.get(endpoint)) is not None:
            found.link.reconnect()

    def bind_peer(self, endpoint: str, peer: Incarnation) -> None:
        """This life is reached over that link."""
        self._unbind(endpoint)
        self._endpoint_of[peer] = endpoint

    def send(self, peer: Incarnation, message: Message) -> None:
        """Send to a life; lost when there is no link to it."""
        found = self._open.get(self._endpoint_of.get(peer, ""))
        if found is None:
            return
        try:
            frames = encode(Envelope(self._own, peer, message), self._limits)
        except ProtocolError as error:
            self._log.error("a %s was not sent: %s", type(message).__name__, error)
            return
        if found.link.send(frames) is SendResult.UNREACHABLE:
            self._log.warning("node at %s takes nothing: messages were dropped", found.link.endpoint)

    def send_unaddressed(self, endpoint: str, message: Message) -> None:
        """Send to whoever lives at the endpoint. Never queued: it is repeated anyway.

        Where there is no link, or one that ZeroMQ gave up, a new one is tried.
        """
        if endpoint in self._unconnected:
            self.open(endpoint)
        if (found := self._open.get(endpoint)) is not None:
            found.due = found.gave_up
            found.link.try_send(encode(Envelope(self._own, Incarnation(""), message), self._limits))

    def flush(self) -> None:
        """Try again to send what waits for nodes that were full or not connected. Called from outside of callbacks."""
        for endpoint, found in list(self._open.items()):
            if found.due:
                self._shut(endpoint)
                self.open(endpoint)
            elif found.link.has_pending:
                found.link.flush()

    def probe(self, endpoint: str) -> None:
        """Find out whether anything listens there; answered by an event."""
        self._watcher.probe(endpoint, PROBE_TIMEOUT_S, lambda result: self._on_probe(endpoint, result))

    def close(self, endpoint: str) -> None:
        """Close one link."""
        self._unconnected.pop(endpoint, None)
        self._failures.pop(endpoint, None)
        self._shut(endpoint)

    def _shut(self, endpoint: str) -> None:
        found = self._open.pop(endpoint, None)
        if found is None:
            return
        for closer in found.closers:
            closer()
        found.monitor.close()
        found.link.close()
        self._unbind(endpoint)

    def close_all(self) -> None:
        """Close every link; nothing is called back after this."""
        for endpoint in [*self._open, *self._unconnected]:
            self.close(endpoint)

    def endpoints(self) -> Iterator[str]:
        """Where links are open to."""
        return iter(self._open)

    def _unbind(self, endpoint: str) -> None:
        self._endpoint_of = {peer: where for peer, where in self._endpoint_of.items() if where != endpoint}

    def _on_frames(self, endpoint: str, frames: list[Frame]) -> None:
        try:
            envelope = decode(frames, self._limits)
        except ProtocolError as error:
            self.malformed += 1
            self._log.warning("dropped a message from %s: %s", endpoint, error)
            return
        if envelope.receiver in (self._own, ""):
            self._on_event(Received(envelope, endpoint))

    def _on_monitor(self, endpoint: str, event: ConnectionEvent) -> None:
        found = self._open.get(endpoint)
        match event:
            case ConnectionEvent.CONNECTED:
                self._failures.pop(endpoint, None)
                self._on_event(LinkConnected(endpoint))
            case ConnectionEvent.DISCONNECTED:
                self._on_event(LinkClosed(endpoint))
            case ConnectionEvent.HANDSHAKE_FAILED | ConnectionEvent.GAVE_UP if found is not None:
                found.gave_up = event is ConnectionEvent.GAVE_UP
                self._failures[endpoint] += 1
                if self._failures[endpoint] == FAILURES_TOLD:
                    self._log.warning("the node at %s is there and no handshake succeeds: %s", endpoint, self._reason())
            case _:
                pass

    def _reason(self) -> str:
        if self._context.security is None:
            return "it does not answer, has keys and this process has none, or is no node"
        return "it does not answer, does not let this process' key in, runs without keys, or is not who its key says"

    def _on_probe(self, endpoint: str, result: ProbeResult) -> None:
        if result is ProbeResult.ACCEPTED:
            self._on_event(ProbeAnswered(endpoint, "accepted"))
        elif result is ProbeResult.REFUSED:
            self._on_event(ProbeAnswered(endpoint, "refused"))
        else:
            self._on_event(ProbeAnswered(endpoint, "unknown"))
