"""Sending end of the simulated KV transport, at a prefill node: reads pieces from the cache, then sends or writes them.

Messages arrive in order or not at all. One-sided writes into staging slots of the receiver land in any order, late, or
without a confirmation. Like the real transport it knows transfer keys, block tables and slots; the cores decide which
transfer may write where.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.events import Event, KvSendFailed, PieceSent, PiecesStopped
from kvferry.common.kv_transfer.slot_writes import SlotWrites
from kvferry.common.protocol.messages import Piece
from kvferry.ops.simulate.costs import CostModel
from kvferry.ops.simulate.kv_network import SEND_TIMEOUT_S, KvNetwork
from kvferry.ops.simulate.kv_receiver import KvReceiver
from kvferry.ops.simulate.kv_store import KvMismatchError, KvStore

RETRY_S = 0.1
"""Retry interval while the receiver is unreachable."""
NO_SLOT_RETRY_S = 0.004
"""Retry interval while no slot is free."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    piece: Piece
    table: tuple[int, ...]
    slots: tuple[int, ...]
    since: float


@dataclass(slots=True)
class _Peer:
    """Pieces for one decode node, in FIFO order."""

    endpoint: str
    session: int = 0
    queue: deque[_Waiting] = field(default_factory=deque)
    busy: bool = False
    moved_at: float = 0.0
    """Time of the last read."""
    last_at: float = 0.0


@dataclass(slots=True)
class _Write:
    """A write into a staging slot."""

    receiver: KvReceiver
    piece: Piece
    """With its slot."""
    table: tuple[int, ...]
    values: list[list[int]]
    breaks: int
    done: bool = False
    """Confirmed or timed out at the sender."""


@dataclass(slots=True)
class KvSender:
    """Sending end of one prefill node."""

    network: KvNetwork
    host: str
    costs: CostModel
    store: KvStore
    post: Callable[[Event], None]
    wake: Callable[..., None]
    """Runs a callback when the process is awake."""
    is_held: Callable[[int], bool]
    """Whether a block is allocated: only such blocks may be read."""
    writes: SlotWrites = field(default_factory=SlotWrites)
    _peers: dict[Incarnation, _Peer] = field(default_factory=dict)
    _stopping: set[TransferKey] = field(default_factory=set)

    def open(self, peer: Incarnation, endpoint: str) -> None:
        """Prepare to send to this incarnation."""
        self._peers.setdefault(peer, _Peer(endpoint))

    def close(self, peer: Incarnation) -> None:
        """Stop reading for this incarnation."""
        known = self._peers.pop(peer, None)
        for waiting in known.queue if known is not None else ():
            self._stopped(waiting.piece.key)

    def send(self, peer: Incarnation, piece: Piece, table: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Queue a piece; its blocks are read when it reaches the head of the queue."""
        known = self._peers.get(peer)
        if known is None:
            self.network.loop.after(0.0, self.post, KvSendFailed(piece.key, "no KV session"))
            return
        known.queue.append(_Waiting(piece, table, slots, self.network.loop.now()))
        self._read_next(peer)

    def stop(self, key: TransferKey) -> None:
        """Stop reading for this key. PiecesStopped follows when no read or write of it is in progress any more."""
        self.writes.stop(key)
        in_progress = self.writes.is_writing(key)
        for known in self._peers.values():
            keep = 1 if known.busy and known.queue and known.queue[0].piece.key == key else 0
            in_progress = in_progress or keep > 0
            known.queue = deque(
                waiting for place, waiting in enumerate(known.queue) if place < keep or waiting.piece.key != key
            )
        if in_progress:
            self._stopping.add(key)
        else:
            self.network.loop.after(0.0002, self.post, PiecesStopped(key))

    # -- the head of a queue

    def _read_next(self, peer: Incarnation) -> None:
        known = self._peers.get(peer)
        if known is None or known.busy or not known.queue:
            return
        known.busy = True
        duration_s = self.costs.piece_duration_s(known.queue[0].piece.num_bytes)
        self.network.loop.after(duration_s, self.wake, self._read, peer)

    def _read(self, peer: Incarnation) -> None:
        known = self._peers.get(peer)
        if known is None:
            return
        known.busy = False
        if not known.queue:
            return
        receiver = self.network.receivers.get(known.endpoint)
        reachable = receiver is not None and receiver.incarnation == peer
        if receiver is None or not reachable or self.network.is_cut(self.host, receiver.host):
            self._wait_or_fail(peer, known, RETRY_S)
            return
        waiting = known.queue[0]
        key = waiting.piece.key
        if waiting.slots and receiver.session(key.prefill) != known.session:
            known.session = receiver.session(key.prefill)
            self._fail_all(known, "the session was closed")
            return
        slot = self.writes.free(key, waiting.slots)
        if waiting.slots and slot is None:
            self._wait_or_fail(peer, known, NO_SLOT_RETRY_S)
            return
        known.queue.popleft()
        known.moved_at = self.network.loop.now()
        self._check_held(waiting.piece, waiting.table)
        rows = range(waiting.piece.layer_start, waiting.piece.layer_end)
        start, end = waiting.piece.token_start, waiting.piece.token_end
        values = [self.store.read(layer, waiting.table, start, end) for layer in rows]
        if slot is None:
            self.post(PieceSent(key, waiting.piece.number))
            self._send_message(known, receiver, waiting.piece, values)
        elif key not in self._stopping:
            self._begin_write(receiver, msgspec.structs.replace(waiting.piece, slot=slot), waiting.table, values)
        self._stopped(key)
        self._read_next(peer)

    def _check_held(self, piece: Piece, table: tuple[int, ...]) -> None:
        size = self.store.block_size
        for block in table[piece.token_start // size : -(-piece.token_end // size)]:
            if not self.is_held(block):
                raise KvMismatchError(f"{self.host}: piece {piece.number} is read from the free block {block}")

    def _stopped(self, key: TransferKey) -> None:
        queued = any(waiting.piece.key == key for known in self._peers.values() for waiting in known.queue)
        if key in self._stopping and not queued and not self.writes.is_writing(key):
            self._stopping.discard(key)
            self.post(PiecesStopped(key))

    def _wait_or_fail(self, peer: Incarnation, known: _Peer, retry_s: float) -> None:
        loop = self.network.loop
        if known.queue[0].piece.key in self._stopping:
            self._stopped(known.queue.popleft().piece.key)
            self._read_next(peer)
        elif loop.now() - max(known.queue[0].since, known.moved_at) < SEND_TIMEOUT_S:
            known.busy = True
            loop.after(retry_s, self.wake, self._read, peer)
        else:
            self._fail_all(known, "timeout")

    def _fail_all(self, known: _Peer, why: str) -> None:
        failed = {waiting.piece.key for waiting in known.queue}
        known.queue.clear()
        for key in sorted(failed):
            self.post(KvSendFailed(key, why))
            self._stopped(key)

    # -- messages

    def _send_message(self, known: _Peer, receiver: KvReceiver, piece: Piece, values: list[list[int]]) -> None:
        known.last_at = max(known.last_at, self.network.loop.now() + self.network.delay_s())
        breaks = self.network.num_breaks(self.host, receiver.host)
        self.network.loop.at(known.last_at, self._message_lands, receiver, piece, values, breaks)

    def _message_lands(self, receiver: KvReceiver, piece: Piece, values: list[list[int]], breaks: int) -> None:
        if not self.network.is_lost(self.host, receiver.host, breaks):
            receiver.arrive(piece, values, self.network.is_damaged(piece), lambda: self._credit(receiver, piece))

    def _credit(self, receiver: KvReceiver, piece: Piece) -> None:
        """Send the Credit of the receiver."""
        breaks = self.network.num_breaks(self.host, receiver.host)
        self.network.loop.after(self.network.delay_s(), self._credit_lands, receiver, piece, breaks)

    def _credit_lands(self, receiver: KvReceiver, piece: Piece, breaks: int) -> None:
        if not self.network.is_lost(self.host, receiver.host, breaks):
            self.wake(self.writes.credited, piece.key, piece.number)

    # -- one-sided writes

    def _begin_write(self, receiver: KvReceiver, piece: Piece, table: tuple[int, ...], values: list[list[int]]) -> None:
        assert piece.slot is not None
        self.writes.begin(piece.key, piece.slot, piece.number)
        write = _Write(receiver, piece, table, values, self.network.num_breaks(self.host, receiver.host))
        loop = self.network.loop
        loop.after(self.network.write_delay_s(), self._write_lands, write)
        loop.after(SEND_TIMEOUT_S, self.wake, self._time_out, write)

    def _write_lands(self, write: _Write) -> None:
        """Land a posted write, even when its sender has ended meanwhile."""
        if self.network.is_lost(self.host, write.receiver.host, write.breaks):
            return
        self.network.num_writes += 1
        self.network.num_late += write.piece.key not in write.receiver.expected
        write.receiver.write_slot(write.piece, write.values)
        if self.network.is_confirmed():
            self.network.loop.after(self.network.delay_s(), self.wake, self._confirmed, write)

    def _confirmed(self, write: _Write) -> None:
        piece = write.piece
        if write.done or piece.slot is None:
            return
        write.done = True
        self._check_held(piece, write.table)
        known = self._peers.get(piece.key.decode)
        if known is None or piece.key in self._stopping:
            self.writes.cancel(piece.key, piece.slot)
        else:
            self.writes.confirm(piece.key, piece.slot)
            self._send_message(known, write.receiver, piece, [])
        self.post(PieceSent(piece.key, piece.number))
        self._stopped(piece.key)

    def _time_out(self, write: _Write) -> None:
        piece = write.piece
        if write.done or piece.slot is None:
            return
        write.done = True
        self.writes.cancel(piece.key, piece.slot)
        if piece.key not in self._stopping:
            self.post(KvSendFailed(piece.key, "a write was not confirmed"))
        self._stopped(piece.key)
