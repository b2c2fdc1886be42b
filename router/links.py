"""The sockets of one worker: a link, its monitor and their readers for each node. A shell without decisions."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from common.config.protocol import Limits
from common.errors import ConfigError, ProtocolError
from common.ids import Incarnation
from common.protocol.messages import Envelope, Message
from common.protocol.wire import Frame, decode, encode
from common.state.events import Event, LinkClosed, LinkConnected, ProbeAnswered, Received
from common.transport.async_receiver import AsyncReceiver
from common.transport.context import TransportContext
from common.transport.link_socket import LinkSocket
from common.transport.monitor import LinkEvent, LinkMonitor
from common.transport.options import SocketOptions
from common.transport.outbox import SendResult
from common.transport.probe import ProbeResult, probe_async

PROBE_TIMEOUT_S = 1.0


@dataclass(slots=True)
class _Open:
    link: LinkSocket
    monitor: LinkMonitor
    readers: tuple[AsyncReceiver[list[Frame]], AsyncReceiver[LinkEvent]]


class WorkerLinks:
    """Opens, closes and uses the links that the core asks for; what comes in is given to `on_event`."""

    def __init__(
        self,
        context: TransportContext,
        own: Incarnation,
        limits: Limits,
        on_event: Callable[[Event], None],
        log: logging.Logger,
    ) -> None:
        self._context = context
        self._own = own
        self._limits = limits
        self._options = SocketOptions.control(limits)
        self._on_event = on_event
        self._log = log
        self._open: dict[str, _Open] = {}
        self._endpoint_of: dict[Incarnation, str] = {}
        self._probes: set[asyncio.Task[None]] = set()

    def open(self, endpoint: str) -> None:
        """Make a link to this endpoint. A wrong address is logged: it came from another process."""
        loop = asyncio.get_running_loop()
        link = LinkSocket(self._context, self._own, self._options)
        monitor = LinkMonitor(self._context, link)
        link.open()
        try:
            monitor.open()
            link.connect(endpoint)
        except ConfigError as error:
            self._log.warning("cannot connect to node %s: %s", endpoint, error)
            monitor.close()
            link.close()
            return
        readers = (
            AsyncReceiver(loop, link, lambda frames: self._on_frames(endpoint, frames)),
            AsyncReceiver(loop, monitor, lambda event: self._on_monitor(endpoint, event)),
        )
        self._open[endpoint] = _Open(link, monitor, readers)
        for reader in readers:
            reader.open()

    def reset(self, endpoint: str) -> None:
        """Drop what waits for the life that ended there."""
        if (found := self._open.get(endpoint)) is not None:
            found.link.reconnect()

    def bind_peer(self, endpoint: str, peer: Incarnation) -> None:
        """This life is reached over that link."""
        self._endpoint_of = {p: e for p, e in self._endpoint_of.items() if e != endpoint}
        self._endpoint_of[peer] = endpoint

    def send(self, peer: Incarnation, message: Message) -> None:
        """Send to a life; lost when there is no link to it."""
        endpoint = self._endpoint_of.get(peer)
        if endpoint is not None:
            self._send(endpoint, Envelope(self._own, peer, message))

    def send_unaddressed(self, endpoint: str, message: Message) -> None:
        """Send to whoever lives at the endpoint. Not queued: it is repeated anyway."""
        found = self._open.get(endpoint)
        if found is not None:
            found.link.try_send(encode(Envelope(self._own, Incarnation(""), message), self._limits))

    def flush(self) -> None:
        """Try again to send what waits for nodes that were full or not connected."""
        for found in self._open.values():
            if found.link.has_pending:
                found.link.flush()

    def probe(self, endpoint: str) -> None:
        """Find out whether anything listens there; answered by an event."""
        task = asyncio.get_running_loop().create_task(self._probe(endpoint))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    def close(self, endpoint: str) -> None:
        """Close one link."""
        found = self._open.pop(endpoint, None)
        if found is None:
            return
        for reader in found.readers:
            reader.close()
        found.monitor.close()
        found.link.close()
        self._endpoint_of = {p: e for p, e in self._endpoint_of.items() if e != endpoint}

    async def close_all(self) -> None:
        """Close everything; nothing is called back after this."""
        for task in list(self._probes):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for endpoint in list(self._open):
            self.close(endpoint)

    def _send(self, endpoint: str, envelope: Envelope) -> None:
        found = self._open.get(endpoint)
        if found is None:
            return
        try:
            frames = encode(envelope, self._limits)
        except ProtocolError as error:
            self._log.error("a message was not sent: %s", error)
            return
        if found.link.send(frames) is SendResult.UNREACHABLE:
            self._log.warning("node at %s takes nothing: messages were dropped", endpoint)

    def _on_frames(self, endpoint: str, frames: list[Frame]) -> None:
        try:
            envelope = decode(frames, self._limits)
        except ProtocolError as error:
            self._log.warning("dropped a message from %s: %s", endpoint, error)
            return
        if envelope.receiver in (self._own, ""):
            self._on_event(Received(envelope, endpoint))

    def _on_monitor(self, endpoint: str, event: LinkEvent) -> None:
        self._on_event(LinkConnected(endpoint) if event is LinkEvent.CONNECTED else LinkClosed(endpoint))

    async def _probe(self, endpoint: str) -> None:
        result = await probe_async(endpoint, PROBE_TIMEOUT_S)
        if result is ProbeResult.ACCEPTED:
            self._on_event(ProbeAnswered(endpoint, "accepted"))
        elif result is ProbeResult.REFUSED:
            self._on_event(ProbeAnswered(endpoint, "refused"))
        else:
            self._on_event(ProbeAnswered(endpoint, "unknown"))
