"""What rank 0 and the other ranks of a node say to one another, and how it is written down. No IO.

Messages are numbered each way: a lost one would leave a rank with another cache than the others, so a gap is an error.
"""

from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar, get_origin

import msgspec

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import (
    Incarnation,
    TransferKey,
)
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.config.schema import LogConfig, SecurityConfig
from kvferry.common.protocol.messages import Piece
from kvferry.common.protocol.wire import Frame
from kvferry.common.scheduling.step import StepBatch

_NUMBER_BYTES = 8
T = TypeVar("T")


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is started with. What has a default is each child's own and filled in by the team."""

    rank: int = 0
    self_id: str = ""
    """The rank's name on the link to rank 0: an incarnation."""
    lead: str = ""
    """Where rank 0 listens."""
    store_port: int = 0
    """Where the ranks find one another."""
    parent_pid: int = 0
    size: int
    model_path: str
    dtype: str | None
    scheme: str | None = None
    """How the weights are kept in fewer bits."""
    settings: NodeSettings
    limits: Limits
    timers: Timers
    log: LogConfig
    security: SecurityConfig


class PieceHeader(msgspec.Struct, frozen=True, array_like=True):
    """A Piece without its bytes."""

    key: TransferKey
    number: int
    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    num_bytes: int

    @classmethod
    def of(cls, piece: Piece) -> "PieceHeader":
        """Of a piece, whatever its bytes."""
        return cls(**{name: getattr(piece, name) for name in cls.__struct_fields__})

    def piece(self) -> Piece:
        """The piece, without data."""
        return Piece(**msgspec.structs.asdict(self))


# -- rank 0 to the others


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Make the cache, meet the other ranks, be ready."""

    incarnation: Incarnation
    """The node's; what goes to or comes from another node bears it."""
    num_blocks: int
    num_host_blocks: int = 0


class RunPlan(msgspec.Struct, frozen=True, tag=True):
    """Compute this rank's part of a step."""

    plan: StepBatch


class OpenPeer(msgspec.Struct, frozen=True, tag=True):
    """KvMover.open; the endpoint is that of the same rank over there."""

    peer: Incarnation
    endpoint: str


class ClosePeer(msgspec.Struct, frozen=True, tag=True):
    """KvMover.close_peer."""

    peer: Incarnation


class SendKv(msgspec.Struct, frozen=True, tag=True):
    """KvMover.send, of this rank's part."""

    piece: PieceHeader
    block_table: tuple[int, ...]


class StopKv(msgspec.Struct, frozen=True, tag=True):
    """KvMover.stop."""

    key: TransferKey


class ExpectKv(msgspec.Struct, frozen=True, tag=True):
    """KvMover.expect; answered by Done."""

    call: int
    key: TransferKey
    block_table: tuple[int, ...]
    first_token: int


class ForgetKv(msgspec.Struct, frozen=True, tag=True):
    """KvMover.forget; answered by Done."""

    call: int
    key: TransferKey


class Quit(msgspec.Struct, frozen=True, tag=True):
    """End in order."""


ToRank = Begin | RunPlan | OpenPeer | ClosePeer | SendKv | StopKv | ExpectKv | ForgetKv | Quit


# -- the others to rank 0


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model's part is there."""

    free_bytes: int
    """Of the rank's device."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Everything is made; KV comes in at this endpoint."""

    kv_endpoint: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """A call was carried out."""

    call: int


class Sent(msgspec.Struct, frozen=True, tag=True):
    """PieceSent."""

    key: TransferKey
    number: int


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """PiecesStopped."""

    key: TransferKey


class SendFailed(msgspec.Struct, frozen=True, tag=True):
    """KvSendFailed."""

    key: TransferKey
    reason: str


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """PieceArrived."""

    piece: PieceHeader


class Bad(msgspec.Struct, frozen=True, tag=True):
    """PieceBad."""

    key: TransferKey
    number: int
    reason: str


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot go on, and ends."""

    reason: str


FromRank = Loaded | Ready | Done | Sent | Stopped | SendFailed | Arrived | Bad | RankFailed


class Outbound(Generic[T]):
    """Writes messages of one direction down."""

    def __init__(self) -> None:
        self._number = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)

    def frames(self, message: T) -> Sequence[Frame]:
        """The next message's frames."""
        self._number += 1
        return [self._number.to_bytes(_NUMBER_BYTES, "little"), self._encoder.encode(message)]


class Incoming(Generic[T]):
    """Reads messages of one direction, and sees that none is missing."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[T]") -> None:
        self._number = 0
        self._decoder = decoder

    def message(self, frames: Sequence[Frame]) -> T:
        """The next message. InvariantError when it is not the next one, or none at all."""
        self._number += 1
        try:
            number, body = frames
            if int.from_bytes(number, "little") != self._number:
                raise InvariantError(f"message {int.from_bytes(number, 'little')} came, {self._number} was due")
            return self._decoder.decode(body)
        except (ValueError, msgspec.MsgspecError) as error:
            raise InvariantError(f"between ranks: {error}") from None


def from_lead() -> Incoming[ToRank]:
    """What a rank hears."""
    return Incoming(msgspec.msgpack.Decoder(ToRank, dec_hook=_from_bytes))


def from_rank() -> Incoming[FromRank]:
    """What rank 0 hears of one rank."""
    return Incoming(msgspec.msgpack.Decoder(FromRank))


def _to_bytes(value: object) -> bytes:
    if isinstance(value, array):
        return value.tobytes()  # both ends are on one host: its own byte order
    raise NotImplementedError(f"{type(value).__name__} is not sent between ranks")


def _from_bytes(kind: type, value: object) -> object:
    if (get_origin(kind) or kind) is array and isinstance(value, bytes):
        return array("I", value)
    raise NotImplementedError(f"{kind} is not sent between ranks")
