"""The states of a hand-over at its sender, and what moves between them. Plain data; `handover_send.py` acts on it.

IDLE        nothing is asked: not yet, or the job pauses and has given its room back
ASKING      Reserve sent to a candidate, repeated
QUEUED      the candidate said that it has no room yet
GRANTED     pieces go out as layers and chunks are computed; when all are given and the token is known: Commit
COMMITTING  Commit sent, repeated; the one decode node of this attempt is fixed from here on
COMMITTED   the decode node owns the request; pieces may be asked for again until it says that it has them all
FAILED, ABORTED   final; blocks may be let go once `pieces_in_flight` is zero
"""

from enum import Enum, auto

from kvferry.common.cluster.table import Table


class SendState(Enum):
    """Where a hand-over is, at its sender."""

    IDLE = auto()
    ASKING = auto()
    QUEUED = auto()
    GRANTED = auto()
    COMMITTING = auto()
    COMMITTED = auto()
    FAILED = auto()
    ABORTED = auto()


class SendEvent(Enum):
    """What moves it."""

    ASK = auto()
    """The next candidate is asked, under a generation of its own."""
    QUEUED = auto()
    """The candidate has no room yet."""
    GRANTED = auto()
    """The candidate keeps room."""
    RELEASE = auto()
    """The job pauses for long: the room is given back, and asked for anew when it goes on."""
    COMMIT = auto()
    """All pieces were given to the transport and the next token is known."""
    COMMITTED = auto()
    """The decode node says that it owns the request."""
    FAIL = auto()
    """No candidate is left, or the Commit led to nothing."""
    ABORT = auto()
    """The request is not wanted any more, or ended with its first token."""


_S, _E = SendState, SendEvent
UNCOMMITTED = (_S.IDLE, _S.ASKING, _S.QUEUED, _S.GRANTED)
SEND_TABLE = Table(
    "hand-over (sender)",
    _S.IDLE,
    {
        **{(state, _E.ASK): _S.ASKING for state in UNCOMMITTED},
        **{(state, _E.FAIL): _S.FAILED for state in (*UNCOMMITTED, _S.COMMITTING)},
        **{(state, _E.ABORT): _S.ABORTED for state in (*UNCOMMITTED, _S.COMMITTING, _S.COMMITTED, _S.FAILED)},
        (_S.ASKING, _E.QUEUED): _S.QUEUED,
        (_S.QUEUED, _E.QUEUED): _S.QUEUED,
        (_S.ASKING, _E.GRANTED): _S.GRANTED,
        (_S.QUEUED, _E.GRANTED): _S.GRANTED,
        **{(state, _E.RELEASE): _S.IDLE for state in (_S.ASKING, _S.QUEUED, _S.GRANTED)},
        (_S.GRANTED, _E.COMMIT): _S.COMMITTING,
        (_S.COMMITTING, _E.COMMITTED): _S.COMMITTED,
        (_S.COMMITTED, _E.COMMITTED): _S.COMMITTED,
    },
)
FINAL = (_S.COMMITTED, _S.FAILED, _S.ABORTED)
