"""The messages between rank 0 and the other ranks of a node. Plain data; `link` encodes them."""

import msgspec

from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.config.schema import LogConfig, SecurityConfig
from kvferry.common.protocol.messages import Piece
from kvferry.common.scheduling.step import StepBatch


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a child process. Fields up to `parent_pid` differ by child and are set by the team."""

    rank: int = 0
    self_id: str = ""
    """The rank's name on the link to rank 0: an incarnation."""
    lead_endpoint: str = ""
    """Where rank 0 listens."""
    store_port: int = 0
    """Port of rank 0's rendezvous store."""
    parent_pid: int = 0
    size: int
    model_path: str
    dtype: str | None
    scheme: str | None = None
    """Weight quantization; None: none."""
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
        return cls(**{name: getattr(piece, name) for name in cls.__struct_fields__})

    def piece(self) -> Piece:
        return Piece(**msgspec.structs.asdict(self))


# -- rank 0 to another rank


class Initialize(msgspec.Struct, frozen=True, tag=True):
    """Allocate the KV cache, join the rendezvous, start the engine and the KV mover; answered by Ready."""

    incarnation: Incarnation
    """The node's: other nodes address every rank by it."""
    num_blocks: int
    num_host_blocks: int = 0


class ComputeStep(msgspec.Struct, frozen=True, tag=True):
    """Compute this rank's part of a step."""

    batch: StepBatch


class OpenPeer(msgspec.Struct, frozen=True, tag=True):
    """KvMover.open, with the endpoint of the same rank of the peer."""

    peer: Incarnation
    endpoint: str


class ClosePeer(msgspec.Struct, frozen=True, tag=True):
    """KvMover.close_peer."""

    peer: Incarnation


class SendKv(msgspec.Struct, frozen=True, tag=True):
    """KvMover.send, for this rank's part."""

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
    """Shut down in order."""


Command = ComputeStep | OpenPeer | ClosePeer | SendKv | StopKv | ExpectKv | ForgetKv
"""Messages that are valid only after Initialize."""
ToRank = Initialize | Command | Quit


# -- another rank to rank 0


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The rank's part of the model is loaded."""

    free_bytes: int
    """Free memory of the rank's device."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Initialize is done; the rank receives KV at this endpoint."""

    kv_endpoint: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """ExpectKv or ForgetKv was carried out."""

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
    """The rank failed, and its process ends."""

    reason: str


KvReport = Sent | Stopped | SendFailed | Arrived | Bad
"""Events of the rank's KV mover."""
FromRank = Loaded | Ready | Done | KvReport | RankFailed
