"""Receiving end of the simulated KV transport, at a decode node: the expected pieces, and staging slots.

One-sided writes land in staging slots at any time, whatever this process does. A write into a slot in use by another
hand-over raises KvMismatchError here; on a real machine it would silently corrupt that hand-over.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.events import Event, PieceArrived, PieceBad, SessionClosed
from kvferry.common.protocol.messages import Piece
from kvferry.ops.simulate.clock import EventLoop
from kvferry.ops.simulate.kv_store import KvMismatchError, KvStore

BELOW = "a piece for a position below"
"""Reason of PieceBad: the piece would overwrite KV that was in the cache before the grant."""
OTHER_SLOT = "a piece in staging slot"
"""Reason of PieceBad: the piece names a slot outside its grant."""
COPY_S = 0.002
"""Copy from a staging slot into blocks."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Blocks and slots that pieces of one key may be written to."""

    table: tuple[int, ...]
    first_token: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class KvReceiver:
    """Receiving end of one decode node."""

    loop: EventLoop
    host: str
    incarnation: Incarnation
    store: KvStore
    post: Callable[[Event], None]
    expected: dict[TransferKey, Expected] = field(default_factory=dict)
    staging: dict[int, list[list[int]]] = field(default_factory=dict)
    """Slot -> the values written into it last."""
    num_dropped: int = 0
    _sessions: dict[Incarnation, int] = field(default_factory=dict)

    def expect(self, key: TransferKey, table: tuple[int, ...], first_token: int, slots: tuple[int, ...]) -> None:
        """Accept pieces of this key into these blocks, from this position on, out of these slots."""
        self.expected[key] = Expected(table, first_token, slots)

    def forget(self, key: TransferKey) -> None:
        """Drop pieces of this key from now on."""
        self.expected.pop(key, None)

    # -- one-sided

    def session(self, peer: Incarnation) -> int:
        """Number of the open session with this incarnation: the count of closed ones."""
        return self._sessions.get(peer, 0)

    def close_session(self, peer: Incarnation) -> None:
        """Refuse writes of this incarnation that start from now on; writes in flight still land."""
        self._sessions[peer] = self.session(peer) + 1
        self.post(SessionClosed(peer))

    def write_slot(self, piece: Piece, values: list[list[int]]) -> None:
        """Land a one-sided write. Raises KvMismatchError when another hand-over uses the slot."""
        assert piece.slot is not None
        for key, expected in self.expected.items():
            if piece.slot in expected.slots and key != piece.key:
                raise KvMismatchError(
                    f"{self.host}: a late write lands in staging slot {piece.slot}, in use by another hand-over"
                )
        self.staging[piece.slot] = values

    # -- messages

    def arrive(self, piece: Piece, values: list[list[int]], damaged: bool, credit: Callable[[], None]) -> None:
        """Receive a Piece, with its bytes or with the slot to copy them from."""
        if piece.slot is None:
            self._take(piece, values, damaged)
        else:
            self.loop.after(COPY_S, self._copy, piece, damaged, credit)

    def _copy(self, piece: Piece, damaged: bool, credit: Callable[[], None]) -> None:
        assert piece.slot is not None
        expected = self.expected.get(piece.key)
        if expected is not None and piece.slot not in expected.slots:
            self.post(PieceBad(piece.key, piece.number, f"{OTHER_SLOT} {piece.slot}"))
        else:
            self._take(piece, self.staging.get(piece.slot, []), damaged)
        credit()

    def _take(self, piece: Piece, values: list[list[int]], damaged: bool) -> None:
        """Check a piece and write it; drop it when its key is not expected."""
        expected = self.expected.get(piece.key)
        if expected is None:
            self.num_dropped += 1
            return
        if piece.token_start < expected.first_token:
            self.post(PieceBad(piece.key, piece.number, f"{BELOW} {expected.first_token}"))
            return
        if damaged:
            self.post(PieceBad(piece.key, piece.number, "checksum"))
            return
        for layer, row in enumerate(values, piece.layer_start):
            self.store.write(layer, expected.table, piece.token_start, row)
        self.post(PieceArrived(piece))
