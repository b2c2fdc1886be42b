"""The states of a hand-over at its sender, and what moves between them. Plain data; `handover.py` acts on it.

IDLE        nothing is asked: not yet, or the job paused and released its reservation
ASKING      Reserve sent to a candidate, repeated until answered
QUEUED      the candidate has no room yet; the reservation waits there
GRANTED     pieces go out as layers and chunks are computed; when all are given and the token is known: Commit
COMMITTING  Commit sent, repeated until answered; from here on the attempt has this one decode node
COMMITTED   the decode node owns the request, and may still ask for pieces again
COMPLETE    the decode node has every piece, or died: nothing is sent any more
FAILED, ABORTED   final; the transport may still read blocks while `is_reading`
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
    COMPLETE = auto()
    FAILED = auto()
    ABORTED = auto()


class SendEvent(Enum):
    """What moves a hand-over."""

    ASK = auto()
    """The next candidate is asked, under a generation of its own."""
    QUEUED = auto()
    """The candidate has no room yet."""
    GRANTED = auto()
    """The candidate reserved blocks."""
    RELEASE = auto()
    """The job has paused for long: the reservation is released, and requested again when the job continues."""
    COMMIT = auto()
    """All pieces were given to the transport and the next token is known."""
    COMMITTED = auto()
    """The decode node owns the request."""
    COMPLETE = auto()
    """The decode node has every piece, or died."""
    FAIL = auto()
    """No candidate is left, or the Commit was refused or not answered."""
    ABORT = auto()
    """The request is not wanted any more, or its first token was its last."""


_S, _E = SendState, SendEvent
UNCOMMITTED = (_S.IDLE, _S.ASKING, _S.QUEUED, _S.GRANTED)
RESERVING = (_S.ASKING, _S.QUEUED, _S.GRANTED)
"""A candidate was asked and nothing is committed: the reservation can still be released."""
SEND_TABLE = Table(
    "hand-over (sender)",
    _S.IDLE,
    {
        **{(state, _E.ASK): _S.ASKING for state in UNCOMMITTED},
        **{(state, _E.FAIL): _S.FAILED for state in (*UNCOMMITTED, _S.COMMITTING)},
        **{
            (state, _E.ABORT): _S.ABORTED
            for state in (*UNCOMMITTED, _S.COMMITTING, _S.COMMITTED, _S.COMPLETE, _S.FAILED)
        },
        (_S.ASKING, _E.QUEUED): _S.QUEUED,
        (_S.QUEUED, _E.QUEUED): _S.QUEUED,
        (_S.ASKING, _E.GRANTED): _S.GRANTED,
        (_S.QUEUED, _E.GRANTED): _S.GRANTED,
        **{(state, _E.RELEASE): _S.IDLE for state in RESERVING},
        (_S.GRANTED, _E.COMMIT): _S.COMMITTING,
        (_S.COMMITTING, _E.COMMITTED): _S.COMMITTED,
        (_S.COMMITTED, _E.COMMITTED): _S.COMMITTED,
        (_S.COMMITTED, _E.COMPLETE): _S.COMPLETE,
    },
)
SEND_FAILURE_IGNORED = (_S.COMMITTED, _S.COMPLETE, _S.FAILED, _S.ABORTED)
