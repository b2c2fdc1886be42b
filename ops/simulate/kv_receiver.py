"""A decode node's end of the simulated KV transport: what pieces are expected, and memory that others write into.

Writes of a one-sided transport land in staging slots whatever this process does, and late; that none lands in a slot in
use by another hand-over is checked here, where a real machine would corrupt it without a word.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.events import Event, PieceArrived, PieceBad, SessionClosed
from kvferry.common.protocol.messages import Piece
from kvferry.ops.simulate.clock import EventLoop
from kvferry.ops.simulate.kv_store import KvMismatchError, KvStore

BELOW = "a piece for a position below"
"""Why a piece is bad that would be written into KV which was there before the grant."""
OTHER_SLOT = "a piece in staging slot"
"""Why a piece is bad that names a slot which the grant has not."""
COPY_S = 0.002
"""From a staging slot into blocks."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Where pieces of one key may be written."""

    table: tuple[int, ...]
    first_token: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class KvReceiver:
    """A decode node's end."""

    loop: EventLoop
    host: str
    incarnation: Incarnation
    store: KvStore
    post: Callable[[Event], None]
    expected: dict[TransferKey, Expected] = field(default_factory=dict)
    staging: dict[int, list[list[int]]] = field(default_factory=dict)
    """Slot -> what was written into it last."""
    num_dropped: int = 0
    _sessions: dict[Incarnation, int] = field(default_factory=dict)

    def expect(self, key: TransferKey, table: tuple[int, ...], first_token: int, slots: tuple[int, ...]) -> None:
        """Pieces of this key may be written into these blocks from this position on, and may name these slots."""
        self.expected[key] = Expected(table, first_token, slots)

    def forget(self, key: TransferKey) -> None:
        """Nothing more is written for this key."""
        self.expected.pop(key, None)

    # -- one-sided

    def session(self, peer: Incarnation) -> int:
        """Which session with this incarnation is open: the number of those that were closed."""
        return self._sessions.get(peer, 0)

    def close_session(self, peer: Incarnation) -> None:
        """Writes of this incarnation that begin from now on are refused; those in progress land."""
        self._sessions[peer] = self.session(peer) + 1
        self.post(SessionClosed(peer))

    def write_slot(self, piece: Piece, values: list[list[int]]) -> None:
        """A write lands."""
        assert piece.slot is not None
        for key, expected in self.expected.items():
            if piece.slot in expected.slots and key != piece.key:
                raise KvMismatchError(
                    f"{self.host}: a late write lands in staging slot {piece.slot}, in use by another"
                )
        self.staging[piece.slot] = values

    # -- messages

    def arrive(self, piece: Piece, values: list[list[int]], damaged: bool, credit: Callable[[], None]) -> None:
        """A Piece came: with its bytes, or naming the slot that they are to be copied from."""
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
        """Check and write a piece; one of a key that is not expected touches nothing."""
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
