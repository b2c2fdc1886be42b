"""The client links of one process: a link and a monitor for each node its core asks for. Makes no decisions.

Used by router workers (in an asyncio loop) and prefill nodes (in a poll loop). A `Watcher` is passed in for what
differs between them: how sockets are watched and addresses probed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvferry.common.base.errors import ConfigError, OutOfSocketsError, ProtocolError
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.events import Event, LinkClosed, LinkConnected, ProbeAnswered, Received
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Envelope, Message
from kvferry.common.protocol.wire import Frame, decode, encode
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.monitor import (
    HANDSHAKE_FAILURES_BEFORE_WARNING,
    ConnectionEvent,
    LinkMonitor,
    connect_watched,
    handshake_advice,
)
from kvferry.common.transport.nonblocking import SendResult
from kvferry.common.transport.options import SocketOptions
from kvferry.common.transport.probe import ProbeResult

PROBE_TIMEOUT_S = 1.0

StopWatching = Callable[[], None]


class Watcher(Protocol):
    """Watches sockets in one loop and probes addresses without blocking it."""

    def watch_link(self, link: LinkSocket, on_message: Callable[[list[Frame]], None]) -> StopWatching:
        """Pass each message of an open link to `on_message`, until the returned function is called."""
        ...

    def watch_monitor(self, monitor: LinkMonitor, on_event: Callable[[ConnectionEvent], None]) -> StopWatching:
        """Pass each connection event to `on_event`, until the returned function is called."""
        ...

    def probe(self, endpoint: str, timeout_s: float, on_result: Callable[[ProbeResult], None]) -> None:
        """Check whether a process listens at the endpoint; `on_result` is called in the loop."""
        ...


@dataclass(slots=True)
class _OpenLink:
    link: LinkSocket
    monitor: LinkMonitor
    closers: tuple[StopWatching, StopWatching]
    gave_up: bool = False
    """ZeroMQ does not retry this connection."""
    must_reopen: bool = False
    """The Hello could not be delivered: `flush` opens a new link."""


class ClientLinks:
    """Opens, closes and uses links, and passes incoming messages and link events to `on_event`. Owned by one loop."""

    def __init__(
        self,
        context: TransportContext,
        self_id: Incarnation,
        limits: Limits,
        timers: Timers,
        watcher: Watcher,
        on_event: Callable[[Event], None],
        log: logging.Logger,
    ) -> None:
        self._context = context
        self._self_id = self_id
        self._limits = limits
        self._options = SocketOptions.control(limits, timers)
        self._watcher = watcher
        self._on_event = on_event
        self._log = log
        self._open: dict[str, _OpenLink] = {}
        self._failures: Counter[str] = Counter()
        """Consecutive failed handshakes by endpoint."""
        self._unconnected: dict[str, str] = {}
        """Requested endpoints without a link -> the last error."""
        self._endpoint_of: dict[Incarnation, str] = {}
        self.malformed = 0
        """Messages dropped because they violated the protocol."""

    def open(self, endpoint: str) -> None:
        """Open a link to this endpoint. An invalid address is logged, not raised: it came from another process.

        Each Hello retries, because the key may be allowed later, or a descriptor become free.
        """
        link = LinkSocket(self._context, self._self_id, self._options)
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
        self._open[endpoint] = _OpenLink(link, monitor, closers)

    def reset(self, endpoint: str) -> None:
        """Drop the messages queued for a dead incarnation, and reconnect."""
        if (found := self._open.get(endpoint)) is not None:
            found.link.reconnect()

    def bind_peer(self, endpoint: str, peer: Incarnation) -> None:
        """Route messages for this incarnation over the link to `endpoint`."""
        self._unbind(endpoint)
        self._endpoint_of[peer] = endpoint

    def send(self, peer: Incarnation, message: Message) -> None:
        """Send to an incarnation. The message is lost when there is no link to it."""
        found = self._open.get(self._endpoint_of.get(peer, ""))
        if found is None:
            return
        try:
            frames = encode(Envelope(self._self_id, peer, message), self._limits)
        except ProtocolError as error:
            self._log.error("cannot send %s: %s", type(message).__name__, error)
            return
        if found.link.send(frames) is SendResult.UNREACHABLE:
            self._log.warning("dropped the messages for node %s: it does not read them", found.link.endpoint)

    def send_unaddressed(self, endpoint: str, message: Message) -> None:
        """Send to whatever incarnation is at the endpoint. Never queued, because the caller repeats it.

        Opens a new link if there is none, or if ZeroMQ has given the link up.
        """
        if endpoint in self._unconnected:
            self.open(endpoint)
        if (found := self._open.get(endpoint)) is not None:
            found.must_reopen = found.gave_up
            found.link.try_send(encode(Envelope(self._self_id, Incarnation(""), message), self._limits))

    def flush(self) -> None:
        """Retry messages queued for nodes that were full or not connected. Must not be called from a callback."""
        for endpoint, found in list(self._open.items()):
            if found.must_reopen:
                self._shut(endpoint)
                self.open(endpoint)
            elif found.link.has_pending:
                found.link.flush()

    def probe(self, endpoint: str) -> None:
        """Check whether a process listens at the endpoint; the answer is a ProbeAnswered event."""
        self._watcher.probe(endpoint, PROBE_TIMEOUT_S, lambda result: self._on_probe(endpoint, result))

    def close(self, endpoint: str) -> None:
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
        """Close every link; no callback is called after this."""
        for endpoint in [*self._open, *self._unconnected]:
            self.close(endpoint)

    def endpoints(self) -> Iterator[str]:
        """The endpoints with an open link."""
        return iter(self._open)

    def _unbind(self, endpoint: str) -> None:
        self._endpoint_of = {peer: where for peer, where in self._endpoint_of.items() if where != endpoint}

    def _on_frames(self, endpoint: str, frames: list[Frame]) -> None:
        try:
            envelope = decode(frames, self._limits)
        except ProtocolError as error:
            self.malformed += 1
            self._log.warning("dropped an invalid message from node %s: %s", endpoint, error)
            return
        if envelope.receiver in (self._self_id, ""):
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
                if self._failures[endpoint] == HANDSHAKE_FAILURES_BEFORE_WARNING:
                    self._log.warning(
                        "node %s accepts connections but the handshake fails; %s",
                        endpoint,
                        handshake_advice(self._context, "node"),
                    )
            case _:
                pass

    def _on_probe(self, endpoint: str, result: ProbeResult) -> None:
        if result is ProbeResult.ACCEPTED:
            self._on_event(ProbeAnswered(endpoint, "accepted"))
        elif result is ProbeResult.REFUSED:
            self._on_event(ProbeAnswered(endpoint, "refused"))
        else:
            self._on_event(ProbeAnswered(endpoint, "unknown"))
