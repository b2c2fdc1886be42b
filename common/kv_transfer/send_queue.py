"""Which piece goes out next, and to whom. Pure: knows no socket, thread or clock.

Pieces wait per peer, first in first out. Peers take turns, one piece each, and each has a window: so many bytes and
pieces may be on their way to it before it has said (by Credit) that it has taken earlier ones. One slow peer fills its
own window and holds up no other. A piece for staging slots waits until one of its slots is free.
"""

from collections import deque
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import (
    Incarnation,
    TransferKey,
)
from kvferry.common.kv_transfer.slot_writes import SlotWrites
from kvferry.common.protocol.messages import Piece


@dataclass(frozen=True, slots=True)
class OutboundPiece:
    """A piece that waits to be read from its blocks."""

    piece: Piece
    block_table: tuple[int, ...]
    slots: tuple[int, ...] = ()
    """One of these staging slots is to carry it; none: its bytes go in the message."""


@dataclass(frozen=True, slots=True)
class Window:
    """How much may be on its way to one peer, and how long it may take nothing."""

    num_bytes: int
    """A single piece larger than this still goes, alone."""
    num_pieces: int
    stall_s: float
    """Something is on its way or cannot go, and nothing has moved for this long: the peer has failed."""


@dataclass(slots=True)
class _Peer:
    pending: deque[OutboundPiece] = field(default_factory=deque)
    in_flight: deque[Piece] = field(default_factory=deque)
    in_flight_bytes: int = 0
    blocked: bool = False
    """The socket took nothing; waits until it says that there is room."""
    moved_at: float = 0.0


class SendQueue:
    """The pieces of all peers that are open."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._peers: dict[Incarnation, _Peer] = {}
        self._turns: deque[Incarnation] = deque()
        self.writes = SlotWrites()

    def __contains__(self, peer: Incarnation) -> bool:
        return peer in self._peers

    @property
    def num_pending(self) -> int:
        """Pieces that wait to be read."""
        return sum(len(peer.pending) for peer in self._peers.values())

    @property
    def num_in_flight(self) -> int:
        """Pieces sent and not yet credited."""
        return sum(len(peer.in_flight) for peer in self._peers.values())

    def open(self, peer: Incarnation) -> None:
        """Take a peer in; InvariantError when it is there already."""
        if peer in self._peers:
            raise InvariantError(f"peer {peer} is open already")
        self._peers[peer] = _Peer()
        self._turns.append(peer)

    def close(self, peer: Incarnation) -> set[TransferKey]:
        """Take a peer out; the keys of pieces that waited or were on their way."""
        state = self._peers.pop(peer, None)
        if state is None:
            return set()
        self._turns.remove(peer)
        keys = _keys(state)
        for key in keys:
            self.writes.stop(key)
        return keys

    def add(self, outgoing: OutboundPiece, now: float) -> None:
        """Put a piece behind all others of its peer, `piece.key.decode`."""
        state = self._peers[outgoing.piece.key.decode]
        if not state.pending and not state.in_flight:
            state.moved_at = now
        state.pending.append(outgoing)

    def next(self) -> OutboundPiece | None:
        """The piece whose turn it is; None when nothing can go. Followed by `given`, `block` or `stop` for it."""
        for _ in range(len(self._turns)):
            state = self._peers[self._turns[0]]
            self._turns.rotate(-1)
            if state.pending and not state.blocked and self._has_room(state):
                return state.pending[0]
        return None

    def given(self, outgoing: OutboundPiece, now: float) -> None:
        """The piece that `next` returned is on its way."""
        state = self._peers[outgoing.piece.key.decode]
        if not state.pending or state.pending[0] is not outgoing:
            raise InvariantError("a piece was sent out of its turn")
        state.pending.popleft()
        state.in_flight.append(outgoing.piece)
        state.in_flight_bytes += outgoing.piece.num_bytes
        state.moved_at = now

    def block(self, peer: Incarnation) -> None:
        """Its socket has no room: leave it out until `unblock`."""
        self._peers[peer].blocked = True

    def unblock(self, peer: Incarnation) -> bool:
        """Its socket may have room again; whether it was blocked."""
        state = self._peers.get(peer)
        was_blocked = state is not None and state.blocked
        if state is not None:
            state.blocked = False
        return was_blocked

    def credited(self, peer: Incarnation, key: TransferKey, number: int, now: float) -> None:
        """The peer has taken a piece. One that is not on its way (stopped, failed, told twice) changes nothing."""
        state = self._peers.get(peer)
        if state is None:
            return
        self.writes.credited(key, number)
        for piece in state.in_flight:
            if piece.number == number and piece.key == key:
                state.in_flight.remove(piece)
                state.in_flight_bytes -= piece.num_bytes
                state.moved_at = now
                return

    def stop(self, key: TransferKey) -> None:
        """Read no more pieces of this key. Those on their way still count for the window until they are credited."""
        self.writes.stop(key)
        state = self._peers.get(key.decode)
        if state is not None:
            state.pending = deque(outgoing for outgoing in state.pending if outgoing.piece.key != key)

    def lost(self, peer: Incarnation) -> set[TransferKey]:
        """The connection broke: what was on its way may not arrive. The keys concerned, which are stopped."""
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
        """Peers that have taken nothing for too long."""
        return [peer for peer, state in self._peers.items() if self._is_due(state, now)]

    def next_deadline(self) -> float | None:
        """When `stalled` is to be asked next; None when nothing is on its way or stuck."""
        return min(
            (state.moved_at + self._window.stall_s for state in self._peers.values() if _is_waiting(state)),
            default=None,
        )

    def check_invariants(self) -> None:
        """Bytes on their way are those of the pieces, windows hold, and every peer has its turn."""
        self.writes.check_invariants()
        if sorted(self._turns) != sorted(self._peers):
            raise InvariantError("turns and peers differ")
        for peer, state in self._peers.items():
            if state.in_flight_bytes != sum(piece.num_bytes for piece in state.in_flight):
                raise InvariantError(f"peer {peer}: {state.in_flight_bytes} bytes booked as on their way, wrongly")
            if len(state.in_flight) > max(1, self._window.num_pieces):
                raise InvariantError(f"peer {peer}: more pieces on their way than its window has")
            if len(state.in_flight) > 1 and state.in_flight_bytes > self._window.num_bytes:
                raise InvariantError(f"peer {peer}: more bytes on their way than its window has")
            if any(outgoing.piece.key.decode != peer for outgoing in state.pending):
                raise InvariantError(f"peer {peer} has another's pieces")

    def _has_room(self, state: _Peer) -> bool:
        waiting = state.pending[0]
        if waiting.slots and self.writes.free(waiting.piece.key, waiting.slots) is None:
            return False
        if not state.in_flight:
            return True
        size = state.pending[0].piece.num_bytes
        return len(state.in_flight) < self._window.num_pieces and state.in_flight_bytes + size <= self._window.num_bytes

    def _is_due(self, state: _Peer, now: float) -> bool:
        return _is_waiting(state) and now >= state.moved_at + self._window.stall_s


def _is_waiting(state: _Peer) -> bool:
    return bool(state.in_flight) or (state.blocked and bool(state.pending))


def _keys(state: _Peer) -> set[TransferKey]:
    return {outgoing.piece.key for outgoing in state.pending} | {piece.key for piece in state.in_flight}
