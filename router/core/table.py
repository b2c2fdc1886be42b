"""The one table that says what can happen to a request at its router worker. Pure.

WAITING  no plan: new and no pair of nodes can serve it yet, or its last attempt ended without an end of the request
PLACED   a Job names a prefill node; the worker waits for the hand-over
HANDED   one decode node owns the attempt
ENDED    the outcome is decided, once; whatever comes later is dropped before this table is asked
"""

from enum import Enum, auto

from kvferry.common.state.table import Table


class RequestState(Enum):
    """Where a request is, as its worker sees it."""

    WAITING = auto()
    PLACED = auto()
    HANDED = auto()
    ENDED = auto()


class RequestEvent(Enum):
    """What moves a request. All but END concern the current attempt only; others are dropped before."""

    PLAN = auto()
    """A plan was made and its Job sent."""
    FIRST_TOKEN = auto()
    """The prefill node's early copy of the first token."""
    DECODE_TOKENS = auto()
    """A decode node of the plan sent tokens: it owns the attempt, whether or not HandedOver came."""
    HANDED_OVER = auto()
    """The prefill node says which decode node owns the attempt."""
    HANDOVER_FAILED = auto()
    """The prefill node can go no further with it."""
    NEVER_KNOWN = auto()
    """The prefill node never saw the Job: it is sent again, unchanged."""
    LOST = auto()
    """The node that had it died, restarted, or says that it is gone."""
    GIVEN_BACK = auto()
    """The decode node ran out of blocks."""
    END = auto()
    """Its last token came, its client left, its deadline passed, no nodes came in time that could do it, or it
    failed for good."""


_S, _E = RequestState, RequestEvent
REQUEST_TABLE = Table(
    "request",
    _S.WAITING,
    {
        (_S.WAITING, _E.PLAN): _S.PLACED,
        (_S.WAITING, _E.END): _S.ENDED,
        (_S.PLACED, _E.FIRST_TOKEN): _S.PLACED,
        (_S.PLACED, _E.DECODE_TOKENS): _S.HANDED,
        (_S.PLACED, _E.HANDED_OVER): _S.HANDED,
        (_S.PLACED, _E.HANDOVER_FAILED): _S.WAITING,
        (_S.PLACED, _E.NEVER_KNOWN): _S.PLACED,
        (_S.PLACED, _E.LOST): _S.WAITING,
        (_S.PLACED, _E.END): _S.ENDED,
        (_S.HANDED, _E.FIRST_TOKEN): _S.HANDED,
        (_S.HANDED, _E.DECODE_TOKENS): _S.HANDED,
        (_S.HANDED, _E.HANDED_OVER): _S.HANDED,
        (_S.HANDED, _E.HANDOVER_FAILED): _S.HANDED,
        (_S.HANDED, _E.LOST): _S.WAITING,
        (_S.HANDED, _E.GIVEN_BACK): _S.WAITING,
        (_S.HANDED, _E.END): _S.ENDED,
    },
)
