"""The simulated KV transport: pieces carry what the sender's cache holds when it is read, and arrive in order or never.

It knows transfer keys and block tables, as the real one does; who may write where is decided by the cores.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.ids import Incarnation, TransferKey
from common.protocol.messages import Piece
from common.state.events import Event, KvSendFailed, PieceArrived, PieceBad, PieceSent, PiecesStopped
from ops.simulate.clock import EventLoop
from ops.simulate.costs import CostModel
from ops.simulate.kv_store import KvMismatchError, KvStore

SEND_TIMEOUT_S = 5.0


@dataclass(slots=True)
class KvNetwork:
    """Which KV endpoints are there, and what is wrong between hosts."""

    loop: EventLoop
    rng: random.Random
    base_delay_s: float = 0.0005
    jitter_s: float = 0.001
    damaged_share: float = 0.0
    """Share of pieces whose bytes arrive wrong."""
    receivers: dict[str, "KvReceiver"] = field(default_factory=dict)
    _cuts: dict[frozenset[str], float] = field(default_factory=dict)
    breaks: dict[frozenset[str], int] = field(default_factory=dict)
    """How often the connections between two hosts broke: what was under way then is lost."""
    num_lost: int = 0
    num_damaged: int = 0

    def cut(self, host_a: str, host_b: str, duration_s: float) -> None:
        """Nothing passes between two hosts for this long; what is under way is lost."""
        pair = frozenset((host_a, host_b))
        self._cuts[pair] = max(self._cuts.get(pair, 0.0), self.loop.now() + duration_s)
        self.blip(host_a, host_b)

    def blip(self, host_a: str, host_b: str) -> None:
        """What is under way between two hosts is lost."""
        pair = frozenset((host_a, host_b))
        self.breaks[pair] = self.breaks.get(pair, 0) + 1

    def is_cut(self, host_a: str, host_b: str) -> bool:
        """Whether nothing passes now."""
        return self._cuts.get(frozenset((host_a, host_b)), 0.0) > self.loop.now()

    def delay_s(self) -> float:
        """How long a piece is under way after it was read."""
        return self.base_delay_s + self.jitter_s * self.rng.random()


@dataclass(slots=True)
class KvReceiver:
    """A decode node's end."""

    host: str
    incarnation: Incarnation
    store: KvStore
    post: Callable[[Event], None]
    expected: dict[TransferKey, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    """Block table, and the first position that may be written."""
    num_dropped: int = 0

    def expect(self, key: TransferKey, table: tuple[int, ...], first_token: int) -> None:
        """Pieces of this key may be written into these blocks, from this position on."""
        self.expected[key] = (table, first_token)

    def forget(self, key: TransferKey) -> None:
        """Nothing more is written for this key."""
        self.expected.pop(key, None)

    def arrive(self, piece: Piece, values: list[list[int]], damaged: bool) -> None:
        """Check and write a piece; one of a key that is not expected touches nothing."""
        expected = self.expected.get(piece.key)
        if expected is None:
            self.num_dropped += 1
            return
        table, first_token = expected
        if piece.token_start < first_token:
            raise KvMismatchError(f"{self.host}: a piece for position {piece.token_start}, below {first_token}")
        if damaged:
            self.post(PieceBad(piece.key, piece.number, "checksum"))
            return
        for layer, row in enumerate(values, piece.layer_start):
            self.store.write(layer, table, piece.token_start, row)
        self.post(PieceArrived(piece))


@dataclass(slots=True)
class _Peer:
    """Pieces for one decode node, first come first served."""

    endpoint: str
    queue: deque[tuple[Piece, tuple[int, ...], float]] = field(default_factory=deque)
    busy: bool = False
    last_at: float = 0.0


@dataclass(slots=True)
class KvSender:
    """A prefill node's end."""

    network: KvNetwork
    host: str
    costs: CostModel
    store: KvStore
    post: Callable[[Event], None]
    wake: Callable[..., None]
    """Does something when the process is awake."""
    is_held: Callable[[int], bool]
    """Whether anybody holds a block: only such blocks may be read."""
    _peers: dict[Incarnation, _Peer] = field(default_factory=dict)
    _stopping: set[TransferKey] = field(default_factory=set)

    def open(self, peer: Incarnation, endpoint: str) -> None:
        """Be ready to send to this life."""
        self._peers.setdefault(peer, _Peer(endpoint))

    def close(self, peer: Incarnation) -> None:
        """Read nothing more for this life."""
        known = self._peers.pop(peer, None)
        for piece, _, _ in known.queue if known is not None else ():
            self._stopped(piece.key)

    def send(self, peer: Incarnation, piece: Piece, table: tuple[int, ...]) -> None:
        """Queue a piece; its blocks are read later."""
        known = self._peers.get(peer)
        if known is None:
            self.network.loop.after(0.0, self.post, KvSendFailed(piece.key, "no KV session"))
            return
        known.queue.append((piece, table, self.network.loop.now()))
        self._go_on(peer)

    def stop(self, key: TransferKey) -> None:
        """Read nothing more for this key, and say so when that is sure: a read under way cannot be stopped."""
        under_way = False
        for known in self._peers.values():
            keep = 1 if known.busy and known.queue and known.queue[0][0].key == key else 0
            under_way = under_way or keep > 0
            known.queue = deque(
                waiting for place, waiting in enumerate(known.queue) if place < keep or waiting[0].key != key
            )
        if under_way:
            self._stopping.add(key)
        else:
            self.network.loop.after(0.0002, self.post, PiecesStopped(key))

    def _go_on(self, peer: Incarnation) -> None:
        known = self._peers.get(peer)
        if known is None or known.busy or not known.queue:
            return
        known.busy = True
        self.network.loop.after(self.costs.piece_duration_s(known.queue[0][0].num_bytes), self.wake, self._read, peer)

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
            self._wait_or_fail(peer, known)
            return
        piece, table, _ = known.queue.popleft()
        size = self.store.block_size
        for block in table[piece.token_start // size : -(-piece.token_end // size)]:
            if not self.is_held(block):
                raise KvMismatchError(f"{self.host}: piece {piece.number} is read from block {block}, which is free")
        rows = range(piece.layer_start, piece.layer_end)
        values = [self.store.read(layer, table, piece.token_start, piece.token_end) for layer in rows]
        self.post(PieceSent(piece.key, piece.number))
        self._stopped(piece.key)
        known.last_at = max(known.last_at, self.network.loop.now() + self.network.delay_s())
        pair = frozenset((self.host, receiver.host))
        self.network.loop.at(known.last_at, self._land, receiver, piece, values, pair, self.network.breaks.get(pair, 0))
        self._go_on(peer)

    def _stopped(self, key: TransferKey) -> None:
        if key in self._stopping:
            self._stopping.discard(key)
            self.post(PiecesStopped(key))

    def _wait_or_fail(self, peer: Incarnation, known: _Peer) -> None:
        loop = self.network.loop
        if known.queue[0][0].key in self._stopping:
            self._stopped(known.queue.popleft()[0].key)
            self._go_on(peer)
            return
        if loop.now() - known.queue[0][2] < SEND_TIMEOUT_S:
            known.busy = True
            loop.after(0.1, self.wake, self._read, peer)
            return
        failed = {waiting[0].key for waiting in known.queue}
        known.queue.clear()
        for key in sorted(failed):
            self.post(KvSendFailed(key, "timeout"))

    def _land(
        self, receiver: KvReceiver, piece: Piece, values: list[list[int]], pair: frozenset[str], breaks: int
    ) -> None:
        if self.network.breaks.get(pair, 0) != breaks and self.network.rng.random() < 0.7:
            self.network.num_lost += 1
            return
        damaged = self.network.damaged_share > 0 and self.network.rng.random() < self.network.damaged_share
        self.network.num_damaged += damaged
        receiver.arrive(piece, values, damaged)
