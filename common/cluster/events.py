"""What happens to a core, as plain data: the events its shell (or the simulation) feeds it."""

from dataclasses import dataclass
from typing import Literal

from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.protocol.messages import Announce, Envelope, Piece
from kvferry.common.scheduling.step import StepResult


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived. `endpoint` names the client link it arrived on; empty at a node's own socket."""

    envelope: Envelope
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Comes several times a second."""


@dataclass(frozen=True, slots=True)
class LinkConnected:
    """The transport made (or made again) the connection of a client link."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The transport lost the connection of a client link."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """What a Probe found."""

    endpoint: str
    result: Literal["accepted", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class Announced:
    """A node made itself known through a proxy."""

    incarnation: Incarnation
    announce: Announce


@dataclass(frozen=True, slots=True)
class LayersDone:
    """The step in flight has completed the kernels of its first `layers` layers."""

    step_id: int
    layers: int


@dataclass(frozen=True, slots=True)
class StepProgressed:
    """The step in flight takes long and has completed another layer. Not posted for every layer."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """The engine finished a step."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine raised: the process cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class KvFailed:
    """The thread that transfers KV raised: nothing is sent or written any more, so the process cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class PieceSent:
    """The transport no longer uses a piece's blocks: its bytes were sent, or written by a one-sided transport."""

    key: TransferKey
    number: int


@dataclass(frozen=True, slots=True)
class PiecesStopped:
    """The transport reads nothing more for this key."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class KvSendFailed:
    """The transport could not send for this key."""

    key: TransferKey
    reason: str


@dataclass(frozen=True, slots=True)
class PieceArrived:
    """A piece was checked and written."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class PieceBad:
    """A piece arrived damaged; nothing of it was written."""

    key: TransferKey
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The transport begins no more writes of this incarnation into staging slots."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Finish the requests that are here, accept no new ones, then end."""


Event = (
    Received | Tick | LinkConnected | LinkClosed | ProbeAnswered | Announced | LayersDone | StepProgressed | StepDone
    | EngineFailed | KvFailed | PieceSent | PiecesStopped | KvSendFailed | PieceArrived | PieceBad | SessionClosed
    | DrainRequested
)  # fmt: skip
