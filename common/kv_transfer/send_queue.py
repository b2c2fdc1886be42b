"""Chooses the next piece to send. Pure: no socket, thread or clock.

Pieces wait in one FIFO queue per peer. Peers are served round robin, one piece each. Each peer has a window that limits
the bytes and pieces in flight, which are those without a Credit. So a slow peer fills its own window and delays no
other. A piece with staging slots waits until one of its slots is free.
"""

from collections import deque
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.kv_transfer.slot_writes import SlotWrites
from kvferry.common.protocol.messages import Piece


@dataclass(frozen=True, slots=True)
class OutboundPiece:
    """A piece that is not read from its blocks yet."""

    piece: Piece
    block_table: tuple[int, ...]
    slots: tuple[int, ...] = ()
    """Staging slots, one of which carries it; empty: its bytes go in the message."""


@dataclass(frozen=True, slots=True)
class Window:
    """Limits on pieces in flight to one peer."""

    num_bytes: int
    """A single larger piece is still sent, alone."""
    num_pieces: int
    stall_s: float
    """A peer with pieces in flight or blocked, and no progress for this long, has failed."""


@dataclass(slots=True)
class _Peer:
    pending: deque[OutboundPiece] = field(default_factory=deque)
    in_flight: deque[Piece] = field(default_factory=deque)
    in_flight_bytes: int = 0
    blocked: bool = False
    """The socket was full; waits until it is writable."""
    progress_at: float = 0.0


class SendQueue:
    """The pieces of all open peers."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._peers: dict[Incarnation, _Peer] = {}
        self._round_robin: deque[Incarnation] = deque()
        self.writes = SlotWrites()

    def __contains__(self, peer: Incarnation) -> bool:
        return peer in self._peers

    @property
    def num_pending(self) -> int:
        """Number of pieces not yet read."""
        return sum(len(peer.pending) for peer in self._peers.values())

    @property
    def num_in_flight(self) -> int:
        """Number of pieces sent and not yet credited."""
        return sum(len(peer.in_flight) for peer in self._peers.values())

    def open(self, peer: Incarnation) -> None:
        """Add a peer. Raises InvariantError when it is open already."""
        if peer in self._peers:
            raise InvariantError(f"peer {peer} is open already")
        self._peers[peer] = _Peer()
        self._round_robin.append(peer)

    def close(self, peer: Incarnation) -> set[TransferKey]:
        """Remove a peer; returns the keys of its pieces waiting or in flight."""
        state = self._peers.pop(peer, None)
        if state is None:
            return set()
        self._round_robin.remove(peer)
        keys = _keys(state)
        for key in keys:
            self.writes.stop(key)
        return keys

    def add(self, outgoing: OutboundPiece, now: float) -> None:
        """Append a piece to the queue of its peer, `piece.key.decode`."""
        state = self._peers[outgoing.piece.key.decode]
        if not state.pending and not state.in_flight:
            state.progress_at = now
        state.pending.append(outgoing)

    def next(self) -> OutboundPiece | None:
        """The next piece; None when none can be sent. The caller must then call `sent`, `block` or `stop` for it."""
        for _ in range(len(self._round_robin)):
            state = self._peers[self._round_robin[0]]
            self._round_robin.rotate(-1)
            if state.pending and not state.blocked and self._fits_window(state):
                return state.pending[0]
        return None

    def sent(self, outgoing: OutboundPiece, now: float) -> None:
        """The piece that `next` returned is in flight."""
        state = self._peers[outgoing.piece.key.decode]
        if not state.pending or state.pending[0] is not outgoing:
            raise InvariantError("a piece was sent out of order")
        state.pending.popleft()
        state.in_flight.append(outgoing.piece)
        state.in_flight_bytes += outgoing.piece.num_bytes
        state.progress_at = now

    def block(self, peer: Incarnation) -> None:
        """Its socket is full: skip it until `unblock`."""
        self._peers[peer].blocked = True

    def unblock(self, peer: Incarnation) -> bool:
        """Its socket is writable again. Returns whether it was blocked."""
        state = self._peers.get(peer)
        was_blocked = state is not None and state.blocked
        if state is not None:
            state.blocked = False
        return was_blocked

    def credited(self, peer: Incarnation, key: TransferKey, number: int, now: float) -> None:
        """The peer has processed a piece. No effect for one not in flight (stopped, failed, credited twice)."""
        state = self._peers.get(peer)
        if state is None:
            return
        self.writes.credited(key, number)
        for piece in state.in_flight:
            if piece.number == number and piece.key == key:
                state.in_flight.remove(piece)
                state.in_flight_bytes -= piece.num_bytes
                state.progress_at = now
                return

    def stop(self, key: TransferKey) -> None:
        """Drop the waiting pieces of this key. Those in flight count for the window until they are credited."""
        self.writes.stop(key)
        state = self._peers.get(key.decode)
        if state is not None:
            state.pending = deque(outgoing for outgoing in state.pending if outgoing.piece.key != key)

    def lost(self, peer: Incarnation) -> set[TransferKey]:
        """The connection broke: pieces in flight may not arrive. Stops and returns their keys."""
        state = self._peers.get(peer)
        if state is None:
            return set()
        keys = {piece.key for piece in state.in_flight}
        state.in_flight.clear()
        state.in_flight_bytes = 0
        for key in keys:
            self.stop(key)
        return keys

    def stalled(self, now: float) -> list[Incarnation]:
        """Peers without progress for `stall_s`."""
        return [peer for peer, state in self._peers.items() if self._is_due(state, now)]

    def next_deadline(self) -> float | None:
        """When to call `stalled` next; None when nothing is in flight or blocked."""
        return min(
            (state.progress_at + self._window.stall_s for state in self._peers.values() if _is_waiting(state)),
            default=None,
        )

    def check_invariants(self) -> None:
        """Raise InvariantError when byte counts, windows or the round robin are wrong."""
        self.writes.check_invariants()
        if sorted(self._round_robin) != sorted(self._peers):
            raise InvariantError("round robin and peers differ")
        for peer, state in self._peers.items():
            if state.in_flight_bytes != sum(piece.num_bytes for piece in state.in_flight):
                raise InvariantError(f"peer {peer}: {state.in_flight_bytes} bytes in flight is a wrong count")
            if len(state.in_flight) > max(1, self._window.num_pieces):
                raise InvariantError(f"peer {peer}: more pieces in flight than its window allows")
            if len(state.in_flight) > 1 and state.in_flight_bytes > self._window.num_bytes:
                raise InvariantError(f"peer {peer}: more bytes in flight than its window allows")
            if any(outgoing.piece.key.decode != peer for outgoing in state.pending):
                raise InvariantError(f"peer {peer} has pieces of another peer")

    def _fits_window(self, state: _Peer) -> bool:
        waiting = state.pending[0]
        if waiting.slots and self.writes.free(waiting.piece.key, waiting.slots) is None:
            return False
        if not state.in_flight:
            return True
        size = state.pending[0].piece.num_bytes
        return len(state.in_flight) < self._window.num_pieces and state.in_flight_bytes + size <= self._window.num_bytes

    def _is_due(self, state: _Peer, now: float) -> bool:
        return _is_waiting(state) and now >= state.progress_at + self._window.stall_s


def _is_waiting(state: _Peer) -> bool:
    return bool(state.in_flight) or (state.blocked and bool(state.pending))


def _keys(state: _Peer) -> set[TransferKey]:
    return {outgoing.piece.key for outgoing in state.pending} | {piece.key for piece in state.in_flight}
