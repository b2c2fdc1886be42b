"""What the transport is given of one job's KV: new pieces, pieces again, and when it must stop. Pure.

Joins the plan of pieces with the record of those that the transport has (`pieces.py`). Decides nothing about the
hand-over itself: `handover.py` says when to give, and for which key. Protocol rules 21, 25, 26.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import TransferKey
from kvferry.common.cluster.actions import Action, Send, SendPiece, StopPieces
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.messages import Abort, Piece
from kvferry.prefill_node.pieces import PiecePlan, PiecesOut


@dataclass(slots=True)
class PieceStream:
    """The pieces of one job, for one transfer key after the other."""

    shape: KvShape
    target_bytes: int
    """About the size of a piece."""
    block_table: tuple[int, ...]
    on_reading: Callable[[bool], None]
    """Called when the transport begins (True) or ends to read the job's blocks."""
    _plan: PiecePlan = field(init=False)
    _out: PiecesOut = field(init=False)
    _slots: tuple[int, ...] = ()
    """Staging slots that were granted for the present key."""
    _stop_owed: set[TransferKey] = field(default_factory=set)
    """Withdrawn during a write: Abort(stopped) follows when the transport has stopped."""

    def __post_init__(self) -> None:
        self._plan = PiecePlan(self.shape, self.target_bytes)
        self._out = PiecesOut(self.on_reading)

    @property
    def num_pieces(self) -> int:
        """Pieces of the present key so far."""
        return len(self._plan)

    @property
    def first_token_pos(self) -> int:
        """First position that the present key carries."""
        return self._plan.first_token_pos

    @property
    def is_reading(self) -> bool:
        """Whether the transport may still read the job's blocks."""
        return len(self._out) > 0

    def may_write(self, key: TransferKey) -> bool:
        """Whether pieces of this key may be read, or written to staging slots, now or later."""
        return key in self._out

    def is_confirmed(self, key: TransferKey) -> bool:
        """Whether no write to a staging slot is in progress for this key."""
        return not (self._slots and key in self._out)

    def all_given(self, num_tokens: int) -> bool:
        """Whether positions below num_tokens that the receiver lacks were given, in every layer."""
        return self._plan.all_given(num_tokens)

    # -- what is computed, and who gets it

    def progress(self, token_start: int, token_end: int, layers: int) -> None:
        """Positions token_start .. token_end - 1 have KV in the first `layers` layers."""
        self._plan.progress(token_start, token_end, layers)

    def restart(self) -> None:
        """Another decode node gets everything again."""
        self._plan.restart()
        self._slots = ()

    def granted(self, first_token_pos: int, slots: tuple[int, ...]) -> None:
        """The receiver lacks KV from this position on, and offers these staging slots."""
        self._plan.first_token_pos, self._slots = first_token_pos, slots

    def forget(self) -> None:
        """The job's blocks are released: no piece can be sent again."""
        self._plan.forget()

    # -- what the transport gets

    def give_new(self, key: TransferKey) -> list[Action]:
        """All that is computed and was not given yet."""
        return [self._give(piece, self._slots) for piece in self._plan.cut(key)]

    def ask_again(self, key: TransferKey, numbers: Iterable[int]) -> None:
        """The receiver lacks these."""
        self._out.ask_again(key, numbers)

    def give_again(self, key: TransferKey) -> list[Action]:
        """What was asked for again, into no slots: after the Commit no write is in progress, so that the receiver may
        free its slots without a quarantine."""
        return [self._give(piece, ()) for piece in self._plan.numbered(self._out.ready(key))]

    def waiting(self, key: TransferKey) -> tuple[int, ...]:
        """Numbers that were asked for again and still wait in the transport."""
        return self._out.waiting(key)

    def stop(self) -> list[Action]:
        """Have the transport stop reading, for every key."""
        return [StopPieces(key) for key in self._out.keys]

    def withdraw(self, key: TransferKey) -> list[Action]:
        """Release the reservation of this key and stop reading for it."""
        stopped = self.is_confirmed(key)
        if not stopped:
            self._stop_owed.add(key)
        return [*self.stop(), Send(key.decode, Abort(key=key, stopped=stopped))]

    # -- what the transport says

    def sent(self, key: TransferKey, number: int) -> bool:
        """Its blocks were read, and a write to a slot was confirmed. Returns whether it was the last of this key."""
        return self._out.sent(key, number)

    def stopped(self, key: TransferKey) -> None:
        """The transport reads nothing more for this key."""
        self._out.stopped(key)

    def fail(self, key: TransferKey) -> bool:
        """The transport cannot send the pieces of this key. Returns whether it has to be stopped."""
        return self._out.fail(key)

    def end_writing(self, key: TransferKey) -> list[Action]:
        """Report that no write of a withdrawn key is in progress any more, if that is owed."""
        if key not in self._stop_owed:
            return []
        self._stop_owed.discard(key)
        return [Send(key.decode, Abort(key=key))]

    def check_invariants(self) -> None:
        """Raises InvariantError when pieces are counted wrongly."""
        if not self._stop_owed <= set(self._out.keys):
            raise InvariantError("Abort(stopped) is owed for a key that is not written")
        self._out.check_invariants()
        self._plan.check_invariants()

    def _give(self, piece: Piece, slots: tuple[int, ...]) -> SendPiece:
        self._out.give(piece.key, piece.number)
        return SendPiece(piece, self.block_table, slots)
