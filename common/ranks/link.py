"""Encoding of the messages between ranks, and their mapping to KV events. No IO.

Messages are numbered in each direction: after a lost one a rank's cache would differ from the others', so a gap is an
error.
"""

from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar, assert_never, get_origin

import msgspec

from kvferry.common.base.errors import InvariantError
from kvferry.common.cluster.events import KvSendFailed, PieceArrived, PieceBad, PieceSent, PiecesStopped
from kvferry.common.protocol.wire import Frame
from kvferry.common.ranks.messages import (
    Arrived,
    Bad,
    FromRank,
    KvReport,
    PieceHeader,
    SendFailed,
    Sent,
    Stopped,
    ToRank,
)

FLUSH_INTERVAL_S = 0.01
"""Interval at which both ends of the link retry messages that the socket had no room for."""
_NUMBER_BYTES = 8
T = TypeVar("T")
PieceEvent = PieceSent | PiecesStopped | KvSendFailed | PieceArrived | PieceBad


class Outbound(Generic[T]):
    """Encodes the messages of one direction."""

    def __init__(self) -> None:
        self._number = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)

    def frames(self, message: T) -> Sequence[Frame]:
        self._number += 1
        return [self._number.to_bytes(_NUMBER_BYTES, "little"), self._encoder.encode(message)]


class Inbound(Generic[T]):
    """Decodes the messages of one direction and checks that none is missing."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[T]") -> None:
        self._number = 0
        self._decoder = decoder

    def message(self, frames: Sequence[Frame]) -> T:
        """Decode the next message. Raises InvariantError for a gap, a duplicate, or frames that are no message."""
        self._number += 1
        try:
            number, body = frames
            if int.from_bytes(number, "little") != self._number:
                raise InvariantError(f"message {int.from_bytes(number, 'little')} came, {self._number} was due")
            return self._decoder.decode(body)
        except (ValueError, msgspec.MsgspecError) as error:
            raise InvariantError(f"between ranks: {error}") from None


def from_lead() -> Inbound[ToRank]:
    """Decoder of a child, for the messages of rank 0."""
    return Inbound(msgspec.msgpack.Decoder(ToRank, dec_hook=_from_bytes))


def from_rank() -> Inbound[FromRank]:
    """Decoder of rank 0, for the messages of one child."""
    return Inbound(msgspec.msgpack.Decoder(FromRank))


def report_of(event: PieceEvent) -> KvReport:
    match event:
        case PieceSent(key, number):
            return Sent(key, number)
        case PiecesStopped(key):
            return Stopped(key)
        case KvSendFailed(key, reason):
            return SendFailed(key, reason)
        case PieceArrived(piece):
            return Arrived(PieceHeader.of(piece))
        case PieceBad(key, number, reason):
            return Bad(key, number, reason)
        case _:
            assert_never(event)


def event_of(report: KvReport) -> PieceEvent:
    match report:
        case Sent(key, number):
            return PieceSent(key, number)
        case Stopped(key):
            return PiecesStopped(key)
        case SendFailed(key, reason):
            return KvSendFailed(key, reason)
        case Arrived(header):
            return PieceArrived(header.piece())
        case Bad(key, number, reason):
            return PieceBad(key, number, reason)
        case _:
            assert_never(report)


def _to_bytes(value: object) -> bytes:
    if isinstance(value, array):
        return value.tobytes()  # native byte order: both ends are on one host
    raise NotImplementedError(f"{type(value).__name__} is not sent between ranks")


def _from_bytes(kind: type, value: object) -> object:
    if (get_origin(kind) or kind) is array and isinstance(value, bytes):
        return array("I", value)
    raise NotImplementedError(f"{kind} is not sent between ranks")
