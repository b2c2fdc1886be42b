"""Combines the KV events of all ranks into one event per piece: sent, arrived, bad. Pure; not thread-safe.

The hand-over's state machine counts pieces, not ranks. A piece is sent when every rank has read its part, and arrived
when every rank has written its part. It is bad if any part is, reported when every rank has reported.
"""

from dataclasses import dataclass, field
from typing import assert_never

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import TransferKey
from kvferry.common.cluster.events import (
    KvFailed,
    KvSendFailed,
    PieceArrived,
    PieceBad,
    PieceSent,
    PiecesStopped,
    SessionClosed,
)
from kvferry.common.kv_transfer.interface import KvEvent
from kvferry.common.protocol.messages import Piece


@dataclass(slots=True)
class _Sending:
    """A transfer key with pieces being sent."""

    reading: dict[int, set[int]] = field(default_factory=dict)
    """Piece number -> ranks that have not read their part yet."""
    stopping: set[int] = field(default_factory=set)
    """Ranks that were asked to stop and have not reported it yet."""
    dropped: bool = False
    """Some rank has stopped (asked to or not): the other pieces of the key will not be sent."""


@dataclass(slots=True)
class _Receiving:
    """A transfer key with pieces being received."""

    written: dict[int, set[int]] = field(default_factory=dict)
    """Piece number -> ranks that have written their part."""
    bad: dict[int, dict[int, str]] = field(default_factory=dict)
    """Piece number -> rank -> why its part is bad."""
    headers: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    """Piece number -> layers and tokens in the first rank's report."""


class PieceTally:
    """The pieces of all transfer keys of one node."""

    def __init__(self, size: int) -> None:
        self._ranks = frozenset(range(size))
        self._sending: dict[TransferKey, _Sending] = {}
        self._receiving: dict[TransferKey, _Receiving] = {}

    # -- requests of the node

    def send(self, piece: Piece) -> None:
        """Record that every rank sends its part of a piece."""
        self._sending.setdefault(piece.key, _Sending()).reading[piece.number] = set(self._ranks)

    def stop(self, key: TransferKey) -> None:
        """Record that every rank is asked to stop."""
        self._sending.setdefault(key, _Sending()).stopping = set(self._ranks)

    def expect(self, key: TransferKey) -> None:
        """Record that every rank expects pieces of a key. Must precede the request to the ranks."""
        self._receiving[key] = _Receiving()

    def forget(self, key: TransferKey) -> None:
        """Ignore later reports for a key."""
        self._receiving.pop(key, None)

    # -- reports of the ranks

    def handle(self, rank: int, event: KvEvent) -> list[KvEvent]:
        """Record one rank's event; returns the node's events. Events of an unknown key or a duplicate return none."""
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
            case SessionClosed():
                raise InvariantError(f"rank {rank} reported {event}, but ranks have no staging slots")
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raises InvariantError for an entry that no report can complete any more."""
        for key, sending in self._sending.items():
            if not sending.reading and not sending.stopping:
                raise InvariantError(f"{key} is retained although every rank has released it")
            if any(not ranks <= self._ranks for ranks in sending.reading.values()):
                raise InvariantError(f"{key}: waits for a rank outside the team")

    def __len__(self) -> int:
        return len(self._sending) + len(self._receiving)

    def _on_sent(self, rank: int, key: TransferKey, number: int) -> list[KvEvent]:
        sending = self._sending.get(key)
        if sending is None or rank not in sending.reading.get(number, ()):
            return []
        sending.reading[number].discard(rank)
        if sending.reading[number] or sending.dropped:
            return self._release_if_idle(key, sending)
        del sending.reading[number]
        return [PieceSent(key, number), *self._release_if_idle(key, sending)]

    def _on_stopped(self, rank: int, key: TransferKey) -> list[KvEvent]:
        sending = self._sending.get(key)
        if sending is None:
            return []
        sending.dropped = True
        sending.stopping.discard(rank)
        for ranks in sending.reading.values():
            ranks.discard(rank)
        return self._release_if_idle(key, sending)

    def _release_if_idle(self, key: TransferKey, sending: _Sending) -> list[KvEvent]:
        """Drop the key when no rank reads for it any more; PiecesStopped is returned once."""
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
            return []  # a duplicate
        written.add(rank)
        if written == self._ranks:
            return [PieceArrived(piece)]
        return self._bad_if_complete(piece.key, receiving, piece.number)

    def _on_bad(self, rank: int, key: TransferKey, number: int, reason: str) -> list[KvEvent]:
        receiving = self._receiving.get(key)
        if receiving is None or rank in receiving.written.get(number, ()):
            return []
        receiving.bad.setdefault(number, {})[rank] = reason
        return self._bad_if_complete(key, receiving, number)

    def _bad_if_complete(self, key: TransferKey, receiving: _Receiving, number: int) -> list[KvEvent]:
        """PieceBad, once, when every rank has reported. Parts that were written stay recorded."""
        bad = receiving.bad.get(number, {})
        if not bad or receiving.written.get(number, set()) | bad.keys() != self._ranks:
            return []
        del receiving.bad[number]
        rank, reason = min(bad.items())
        return [PieceBad(key, number, f"rank {rank}: {reason}")]
