"""What the pure cores ask their shells to do. Plain data; performing them is the shell's (or the simulation's) part."""

from dataclasses import dataclass

from kvferry.common.base.ids import (
    Incarnation,
    TransferKey,
)
from kvferry.common.protocol.messages import Message, Piece
from kvferry.common.scheduling.step import StepBatch


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on the link to this process life. May be lost; nothing rests on its arrival."""

    peer: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class SendHello:
    """Put a Hello (or another message for whoever lives there) on the link to this endpoint."""

    endpoint: str
    message: Message


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Make a client socket to this control endpoint."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the client socket to this control endpoint."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class ResetLink:
    """The life at this endpoint has ended: drop what still waits for it, and try to connect anew."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class BindPeer:
    """From now on this process life is reached over the link to this endpoint."""

    endpoint: str
    peer: Incarnation


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether anything listens at this endpoint; answered by a ProbeAnswered event."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class RunStep:
    """Give the engine its next step."""

    plan: StepBatch


@dataclass(frozen=True, slots=True)
class SendPiece:
    """Give one piece of KV to the transport; answered by PieceSent. `piece` has no data yet."""

    peer: Incarnation
    piece: Piece
    block_table: tuple[int, ...]
    slots: tuple[int, ...] = ()
    """Staging slots of the peer, one of which may carry it; PieceSent then means that the write was confirmed."""


@dataclass(frozen=True, slots=True)
class StopPieces:
    """Read nothing more for this key; answered by PiecesStopped when the transport has let go of the blocks."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class OpenKv:
    """Make ready to send KV to this process life."""

    peer: Incarnation
    endpoints: tuple[str, ...]
    """One for each of its ranks."""
    staging: str = ""
    """Where its staging slots are, if this process can reach them."""


@dataclass(frozen=True, slots=True)
class CloseKv:
    """No KV goes to this process life any more."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class ExpectPieces:
    """Let pieces of this key be written into these blocks, at positions from first_token on: below is shared KV."""

    key: TransferKey
    block_table: tuple[int, ...]
    first_token: int
    slots: tuple[int, ...] = ()
    """Staging slots that pieces of this key may name."""


@dataclass(frozen=True, slots=True)
class ForgetPieces:
    """Once this is performed nothing is written for this key any more (it is done in order, before later actions)."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Let no write of this life into staging slots begin any more; answered by SessionClosed, else asked again."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class ExitProcess:
    """This process shall end: drained, or its engine is stuck."""

    reason: str
    code: int


Action = (
    Send | SendHello | OpenLink | CloseLink | ResetLink | BindPeer | Probe | RunStep | SendPiece | StopPieces
    | OpenKv | CloseKv | ExpectPieces | ForgetPieces | CloseSession | ExitProcess
)  # fmt: skip
