"""What the movers of all ranks say of one piece, as one word: sent, arrived, bad. Pure; knows no thread.

The hand-over's state machine counts pieces, not ranks. A piece is sent when every rank has read its part, and is there
when every rank has written its part; when one part is bad the piece is, as soon as all ranks have spoken.
"""

from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import TransferKey
from kvferry.common.cluster.events import (
    KvFailed,
    KvSendFailed,
    PieceArrived,
    PieceBad,
    PieceSent,
    PiecesStopped,
)
from kvferry.common.kv_transfer.interface import KvEvent
from kvferry.common.protocol.messages import Piece


@dataclass(slots=True)
class _Sending:
    """One key that pieces go out for."""

    reading: dict[int, set[int]] = field(default_factory=dict)
    """Piece -> ranks that have not read their part yet."""
    stopping: set[int] = field(default_factory=set)
    """Ranks that were told to stop and have not said so."""
    dropped: bool = False
    """Some rank stopped by itself: it reads nothing more."""


@dataclass(slots=True)
class _Receiving:
    """One key that pieces come in for."""

    written: dict[int, set[int]] = field(default_factory=dict)
    """Piece -> ranks that have written their part."""
    bad: dict[int, dict[int, str]] = field(default_factory=dict)
    """Piece -> ranks whose part was not right, and why."""
    headers: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    """Piece -> layers and tokens as the first rank had them."""


class PieceTally:
    """The pieces of all transfer keys of one node."""

    def __init__(self, size: int) -> None:
        self._ranks = frozenset(range(size))
        self._sending: dict[TransferKey, _Sending] = {}
        self._receiving: dict[TransferKey, _Receiving] = {}

    # -- what the node asks of all ranks

    def send(self, piece: Piece) -> None:
        """A piece was given to every rank."""
        self._sending.setdefault(piece.key, _Sending()).reading[piece.number] = set(self._ranks)

    def stop(self, key: TransferKey) -> None:
        """Every rank was told to stop."""
        self._sending.setdefault(key, _Sending()).stopping = set(self._ranks)

    def expect(self, key: TransferKey) -> None:
        """Every rank will be told to expect a key."""
        self._receiving[key] = _Receiving()

    def forget(self, key: TransferKey) -> None:
        """Every rank will be told to forget a key."""
        self._receiving.pop(key, None)

    # -- what a rank says

    def handle(self, rank: int, event: KvEvent) -> list[KvEvent]:
        """One rank's word; what that means for the node. What was given up or ended before means nothing."""
        match event:
            case PieceSent(key, number):
                return self._on_sent(rank, key, number)
            case PiecesStopped(key):
                return self._on_stopped(rank, key)
            case KvSendFailed() | KvFailed():
                return [event]
            case PieceArrived(piece):
                return self._on_arrived(rank, piece)
            case PieceBad(key, number, reason):
                return self._on_bad(rank, key, number, reason)
        raise InvariantError(f"no row for {event}")

    def check_invariants(self) -> None:
        """Raises InvariantError when something is kept that nobody waits for."""
        for key, sending in self._sending.items():
            if not sending.reading and not sending.stopping:
                raise InvariantError(f"{key} is kept although every rank has let go")
            if any(not ranks <= self._ranks for ranks in sending.reading.values()):
                raise InvariantError(f"{key}: a rank that there is not")

    def __len__(self) -> int:
        return len(self._sending) + len(self._receiving)

    def _on_sent(self, rank: int, key: TransferKey, number: int) -> list[KvEvent]:
        sending = self._sending.get(key)
        if sending is None or rank not in sending.reading.get(number, ()):
            return []
        sending.reading[number].discard(rank)
        if sending.reading[number] or sending.dropped:
            return self._let_go(key, sending)
        del sending.reading[number]
        return [PieceSent(key, number), *self._let_go(key, sending)]

    def _on_stopped(self, rank: int, key: TransferKey) -> list[KvEvent]:
        sending = self._sending.get(key)
        if sending is None:
            return []
        sending.dropped = True
        sending.stopping.discard(rank)
        for ranks in sending.reading.values():
            ranks.discard(rank)
        return self._let_go(key, sending)

    def _let_go(self, key: TransferKey, sending: _Sending) -> list[KvEvent]:
        """Forget the key when no rank reads for it any more. The answer to a stop is given once."""
        if sending.stopping or any(sending.reading.values()):
            return []
        del self._sending[key]
        return [PiecesStopped(key)] if sending.dropped else []

    def _on_arrived(self, rank: int, piece: Piece) -> list[KvEvent]:
        receiving = self._receiving.get(piece.key)
        if receiving is None:
            return []
        header = piece.layer_start, piece.layer_end, piece.token_start, piece.token_end
        if receiving.headers.setdefault(piece.number, header) != header:
            return self._on_bad(rank, piece.key, piece.number, "ranks were sent different pieces under one number")
        written = receiving.written.setdefault(piece.number, set())
        if written == self._ranks:
            return []  # a second copy
        written.add(rank)
        return [PieceArrived(piece)] if written == self._ranks else self._judge(piece.key, receiving, piece.number)

    def _on_bad(self, rank: int, key: TransferKey, number: int, reason: str) -> list[KvEvent]:
        receiving = self._receiving.get(key)
        if receiving is None or rank in receiving.written.get(number, ()):
            return []
        receiving.bad.setdefault(number, {})[rank] = reason
        return self._judge(key, receiving, number)

    def _judge(self, key: TransferKey, receiving: _Receiving, number: int) -> list[KvEvent]:
        """Bad once, when every rank has spoken; what was written stays written."""
        bad = receiving.bad.get(number, {})
        if not bad or receiving.written.get(number, set()) | bad.keys() != self._ranks:
            return []
        del receiving.bad[number]
        rank, reason = min(bad.items())
        return [PieceBad(key, number, f"rank {rank}: {reason}")]
