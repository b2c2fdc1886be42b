"""What the pure cores ask their shells to do. Plain data: the shell, or the simulation, performs them in order."""

from dataclasses import dataclass

from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.protocol.messages import Message, Piece
from kvferry.common.scheduling.step import StepBatch


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on the link to this incarnation. It may be lost; nothing depends on its arrival."""

    peer: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class SendHello:
    """Put a Hello on the link to this endpoint, for the incarnation that runs there."""

    endpoint: str
    message: Message


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open a client socket to this control endpoint."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the client socket to this control endpoint."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class ResetLink:
    """The incarnation at this endpoint has ended: drop messages that wait for it, and reconnect."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class BindPeer:
    """From now on this incarnation is reached over the link to this endpoint."""

    endpoint: str
    peer: Incarnation


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether any process listens at this endpoint; answered by ProbeAnswered."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class RunStep:
    """Give the engine its next step."""

    plan: StepBatch


@dataclass(frozen=True, slots=True)
class SendPiece:
    """Give one piece of KV to the transport, for the decode node of its key; answered by PieceSent. `piece` has no data
    yet."""

    piece: Piece
    block_table: tuple[int, ...]
    slots: tuple[int, ...] = ()
    """Staging slots of the peer, one of which may carry it; PieceSent then means that the write was confirmed."""


@dataclass(frozen=True, slots=True)
class StopPieces:
    """Read nothing more for this key; answered by PiecesStopped when the transport no longer uses the blocks."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class OpenKv:
    """Prepare to send KV to this incarnation."""

    peer: Incarnation
    endpoints: tuple[str, ...]
    """One for each of its ranks."""
    staging: str = ""
    """Where its staging slots are, if this process can reach them."""


@dataclass(frozen=True, slots=True)
class CloseKv:
    """Send no more KV to this incarnation."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class ExpectPieces:
    """Allow pieces of this key to be written into these blocks, from position first_token on: below it is shared KV."""

    key: TransferKey
    block_table: tuple[int, ...]
    first_token: int
    slots: tuple[int, ...] = ()
    """Staging slots that pieces of this key may name."""


@dataclass(frozen=True, slots=True)
class ForgetPieces:
    """Write nothing more for this key. Performed in order: once it is done, later actions may free the blocks."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Let no write of this incarnation into staging slots begin any more; answered by SessionClosed, else repeated."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class ExitProcess:
    """End this process: drained, or its engine is stuck."""

    reason: str
    code: int


Action = (
    Send | SendHello | OpenLink | CloseLink | ResetLink | BindPeer | Probe | RunStep | SendPiece | StopPieces
    | OpenKv | CloseKv | ExpectPieces | ForgetPieces | CloseSession | ExitProcess
)  # fmt: skip
