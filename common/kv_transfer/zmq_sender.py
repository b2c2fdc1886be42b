"""The sending half of the mover: one link per peer; reads each piece from the cache just before it is sent.

Runs on the KV thread. It sends a copy of the blocks, so the blocks are free as soon as the copy is made. ZeroMQ sends
that copy without copying it again.
"""

import logging
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvferry.common.base.errors import ConfigError, OutOfSocketsError, ProtocolError
from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.events import KvSendFailed, PieceSent, PiecesStopped
from kvferry.common.kv_transfer.interface import BlockBytes, KvEnd
from kvferry.common.kv_transfer.send_queue import OutboundPiece, SendQueue, Window
from kvferry.common.kv_transfer.staging import SlotWriter
from kvferry.common.protocol.messages import Credit, Envelope, Piece
from kvferry.common.protocol.wire import decode, encode
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.monitor import ConnectionEvent, LinkMonitor, connect_watched
from kvferry.common.transport.poll_loop import PollLoop

_LOG = logging.getLogger("kvferry.kv")
MAX_SENT = 8
"""Pieces per `pump`, so that receiving is not delayed."""

MakeLink = Callable[[], tuple[LinkSocket, LinkMonitor]]
"""Creates a link and its monitor, both unopened."""


@dataclass(frozen=True, slots=True)
class _Route:
    endpoint: str
    link: LinkSocket
    monitor: LinkMonitor


class ZmqSender:
    """Sends pieces to any number of peers, round robin."""

    def __init__(
        self,
        end: KvEnd,
        cache: BlockBytes,
        writer: SlotWriter,
        loop: PollLoop,
        make_link: MakeLink,
        window: Window,
        *,
        checksum: bool,
    ) -> None:
        self._end = end
        self._cache = cache
        self._writer = writer
        self._loop = loop
        self._make_link = make_link
        self._queue = SendQueue(window)
        self._checksum = checksum
        self._routes: dict[Incarnation, _Route] = {}
        self._unconnected: dict[Incarnation, str] = {}
        self.counts: Counter[str] = Counter()
        """`pieces`, `bytes` (sent); `staged` (through a slot); `failed` (keys), `malformed` (messages from peers)."""

    # -- commands

    def open(self, peer: Incarnation, endpoint: str, staging: str) -> None:
        """Connect to a peer; reconnect when its endpoint has changed. With a wrong endpoint every piece fails.

        A failed connect is retried with each piece: the peer's key may be allowed by then, or a descriptor free.
        """
        self._connect(peer, endpoint)
        if staging:
            self._writer.open(peer, staging)

    def _connect(self, peer: Incarnation, endpoint: str) -> None:
        route = self._routes.get(peer)
        if route is not None and route.endpoint == endpoint:
            return
        was_logged = self._unconnected.get(peer) == endpoint
        self._close_connection(peer)
        link, monitor = self._make_link()
        try:
            connect_watched(link, monitor, endpoint)
        except (ConfigError, OutOfSocketsError) as error:  # the endpoint came from another process
            if not was_logged:
                _LOG.warning("cannot send KV to %s: %s", peer, error)
            self._unconnected[peer] = endpoint
            return
        self._routes[peer] = _Route(endpoint, link, monitor)
        self._queue.open(peer)
        self._loop.add(link, lambda: self._on_link(peer, link))
        self._loop.add(monitor, lambda: self._on_monitor(peer, link, monitor))

    def close_peer(self, peer: Incarnation) -> None:
        """Close the link to a peer, unmap its slots, and drop its waiting pieces."""
        self._writer.close(peer)
        self._close_connection(peer)

    def _close_connection(self, peer: Incarnation) -> None:
        """Like `close_peer`, but keep its slots mapped, for a new connection to the same incarnation."""
        self._unconnected.pop(peer, None)
        self._disconnect(peer)
        for key in self._queue.close(peer):
            self._end.post(PiecesStopped(key))

    def send(self, piece: Piece, block_table: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Queue a piece."""
        if (endpoint := self._unconnected.get(piece.key.decode)) is not None:
            self._connect(piece.key.decode, endpoint)
        if piece.key.decode not in self._queue:
            self._fail(piece.key, "no link to this node")
            return
        usable = slots if self._writer.fits(piece.key.decode, piece.num_bytes) else ()
        self._queue.add(OutboundPiece(piece, block_table, usable), self._end.clock.now())

    def stop(self, key: TransferKey) -> None:
        """Read no more pieces of a key."""
        self._queue.stop(key)
        self._end.post(PiecesStopped(key))

    def close(self) -> None:
        """Close all links. Posts nothing."""
        for peer in list(self._routes):
            self._disconnect(peer)
            self._queue.close(peer)
        self._writer.close_all()

    # -- called by the loop

    def pump(self) -> bool:
        """Send up to MAX_SENT pieces. Returns whether more may be sendable."""
        for _ in range(MAX_SENT):
            outgoing = self._queue.next()
            if outgoing is None:
                return False
            self._send_now(outgoing)
        return True

    def next_deadline(self) -> float | None:
        """When to call `reset_stalled` next."""
        return self._queue.next_deadline()

    def reset_stalled(self) -> None:
        """Fail all pieces of stalled peers and reconnect to these peers."""
        for peer in self._queue.stalled(self._end.clock.now()):
            endpoint = self._routes[peer].endpoint
            self._disconnect(peer)
            for key in self._queue.close(peer):
                self._fail(key, "the node accepts no KV")
            self._connect(peer, endpoint)

    def check_invariants(self) -> None:
        self._queue.check_invariants()

    # -- internal

    def _send_now(self, outgoing: OutboundPiece) -> None:
        peer = outgoing.piece.key.decode
        link = self._routes[peer].link
        if not link.writable():
            self._block(peer, link)
            return
        try:
            piece = self._staged(outgoing, self._read(outgoing))
            frames = encode(Envelope(self._end.self_id, peer, piece), self._end.limits)
        except (ValueError, RuntimeError, ProtocolError) as error:  # an invalid range; errors of the device
            self._queue.stop(outgoing.piece.key)
            self._fail(outgoing.piece.key, f"cannot be sent: {error}")
            return
        if not link.try_send(frames):
            self._queue.writes.credited(piece.key, piece.number)  # no Piece that names the slot was sent
            self._block(peer, link)
            return
        self._queue.sent(outgoing, self._end.clock.now())
        self.counts["pieces"] += 1
        self.counts["bytes"] += outgoing.piece.num_bytes
        self.counts["staged"] += piece.slot is not None
        self._end.post(PieceSent(outgoing.piece.key, outgoing.piece.number))

    def _read(self, outgoing: OutboundPiece) -> Piece:
        piece = outgoing.piece
        data = self._cache.read(
            piece.layer_start, piece.layer_end, outgoing.block_table, piece.token_start, piece.token_end
        )
        if data.nbytes != piece.num_bytes:
            raise ValueError(f"{data.nbytes} bytes read, the piece has {piece.num_bytes}")
        checksum = zlib.crc32(data) if self._checksum else None
        return msgspec.structs.replace(piece, data=data, checksum=checksum)

    def _staged(self, outgoing: OutboundPiece, piece: Piece) -> Piece:
        """If a granted slot is usable, write the bytes into it and replace them by the slot's number."""
        slot = self._queue.writes.free(piece.key, outgoing.slots)
        if slot is None:
            return piece
        self._queue.writes.begin(piece.key, slot, piece.number)
        try:
            self._writer.write(piece.key.decode, slot, piece.data)
        except ValueError:
            self._queue.writes.cancel(piece.key, slot)
            raise
        self._queue.writes.confirm(piece.key, slot)
        return msgspec.structs.replace(piece, slot=slot, data=b"")

    def _block(self, peer: Incarnation, link: LinkSocket) -> None:
        self._queue.block(peer)
        self._loop.watch_writable(link, True)

    def _on_link(self, peer: Incarnation, link: LinkSocket) -> None:
        self._take_credits(peer, link)
        if link.writable() and self._queue.unblock(peer):
            self._loop.watch_writable(link, False)

    def _take_credits(self, peer: Incarnation, link: LinkSocket) -> None:
        for frames in link.receive():
            try:
                envelope = decode(frames, self._end.limits)
            except ProtocolError:
                self.counts["malformed"] += 1
                continue
            credit = envelope.message
            if isinstance(credit, Credit) and (envelope.sender, envelope.receiver) == (peer, self._end.self_id):
                self._queue.credited(peer, credit.key, credit.slot, self._end.clock.now())
            else:
                self.counts["malformed"] += 1

    def _on_monitor(self, peer: Incarnation, link: LinkSocket, monitor: LinkMonitor) -> None:
        if ConnectionEvent.DISCONNECTED in list(monitor.receive()):
            self._take_credits(peer, link)  # credits that arrived before the disconnect
            for key in self._queue.lost(peer):
                self._fail(key, "the connection broke")

    def _fail(self, key: TransferKey, reason: str) -> None:
        self.counts["failed"] += 1
        self._end.post(KvSendFailed(key, reason))

    def _disconnect(self, peer: Incarnation) -> None:
        route = self._routes.pop(peer, None)
        if route is None:
            return
        for source in (route.link, route.monitor):
            self._loop.remove(source)
        route.monitor.close()
        route.link.close()
