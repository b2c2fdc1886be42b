"""The states of a request on the decode node, from its reservation to its end, and the record of its pieces. Pure.

QUEUED      no blocks yet; the reservation waits
RESERVED    blocks are reserved, pieces may be written
REVOKED     the reservation was cancelled; its prefill node is notified
OWNED       committed: this node owns the request, but pieces are still missing
RUNNING     every piece arrived undamaged: it decodes
FINISHED    its last token was sampled
FAILED      no token could be sampled
PREEMPTED   blocks ran out, or the node drains: it continues elsewhere
LOST        it cannot continue here: pieces or time are missing
The last four have ended: entries without blocks, kept until the worker's wanted set drops the request. A request whose
prompt was computed in this very process is RUNNING from the start: it has its blocks, and no pieces arrive.

Protocol rules 15, 16, 23 to 27.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.common.cluster.table import Table
from kvferry.common.protocol.messages import Commit, Piece


class ReceiveState(Enum):
    """Where a request is, on the decode node."""

    QUEUED = auto()
    RESERVED = auto()
    REVOKED = auto()
    OWNED = auto()
    RUNNING = auto()
    FINISHED = auto()
    FAILED = auto()
    PREEMPTED = auto()
    LOST = auto()


class ReceiveEvent(Enum):
    """What moves it. Removal from the table (abort, no longer wanted) needs no row."""

    GRANT = auto()
    """There are blocks for it."""
    REVOKE = auto()
    """The decode node cancels the reservation. A copy of the Reserve must not be granted again: pieces sent for the
    first grant would be taken for the second one's."""
    COMMIT = auto()
    """The prefill node hands it over."""
    ADOPT = auto()
    """The prefill role of this process has computed it."""
    COMPLETE = auto()
    """The last missing piece arrived, and all are undamaged."""
    FINISH = auto()
    """Its last token was sampled."""
    FAIL = auto()
    """No token could be sampled."""
    PREEMPT = auto()
    """Blocks ran out, or the drain took too long."""
    LOSE = auto()
    """Pieces did not arrive or are damaged, or its deadline passed."""


_S, _E = ReceiveState, ReceiveEvent
RECEIVE_TABLE = Table(
    "hand-over (receiver)",
    _S.QUEUED,
    {
        (_S.QUEUED, _E.GRANT): _S.RESERVED,
        (_S.QUEUED, _E.ADOPT): _S.RUNNING,
        (_S.QUEUED, _E.REVOKE): _S.REVOKED,
        (_S.RESERVED, _E.REVOKE): _S.REVOKED,
        (_S.RESERVED, _E.COMMIT): _S.OWNED,
        (_S.OWNED, _E.COMPLETE): _S.RUNNING,
        (_S.OWNED, _E.LOSE): _S.LOST,
        (_S.OWNED, _E.PREEMPT): _S.PREEMPTED,
        (_S.RUNNING, _E.FINISH): _S.FINISHED,
        (_S.RUNNING, _E.FAIL): _S.FAILED,
        (_S.RUNNING, _E.PREEMPT): _S.PREEMPTED,
        (_S.RUNNING, _E.LOSE): _S.LOST,
    },
)
HOLDS_BLOCKS = (_S.RESERVED, _S.OWNED, _S.RUNNING)
ENDED = (_S.FINISHED, _S.FAILED, _S.PREEMPTED, _S.LOST)


@dataclass(slots=True)
class PieceLedger:
    """Which pieces of one transfer key arrived undamaged, and which were asked for again."""

    num_layers: int
    first_token_pos: int
    arrived: dict[int, Piece] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    """Arrived damaged, and not undamaged since."""
    asked: set[int] = field(default_factory=set)
    """Already asked for a second time."""
    spoiled: set[int] = field(default_factory=set)
    """Arrived damaged at least once."""
    last_arrival: float = 0.0

    def add(self, piece: Piece, now: float) -> None:
        """A piece was written; a second copy changes nothing."""
        self.arrived[piece.number] = piece
        self.damaged.discard(piece.number)
        self.last_arrival = now

    def add_damaged(self, number: int, now: float) -> None:
        """A piece arrived damaged."""
        self.damaged.add(number)
        self.spoiled.add(number)
        self.last_arrival = now

    def missing(self, commit: Commit) -> tuple[int, ...]:
        """Numbers that the Commit counts and that have not arrived."""
        return tuple(number for number in range(commit.num_pieces) if number not in self.arrived)

    def ask(self, numbers: Collection[int], now: float) -> bool:
        """Note that these are asked for a second time. Returns False if one of them already was."""
        if self.asked.intersection(numbers):
            return False
        self.asked.update(numbers)
        self.damaged.difference_update(numbers)
        self.last_arrival = now
        return True

    def hear_of(self, waiting: Collection[int], now: float) -> None:
        """These still wait at their sender: they count as not asked for."""
        if waiting:
            self.asked.difference_update(waiting)
            self.last_arrival = now

    def fault(self, commit: Commit) -> str | None:
        """With all pieces there: what is wrong with them as a whole. None if they cover exactly what was missing."""
        if commit.first_token_pos != self.first_token_pos:
            return f"carries positions from {commit.first_token_pos} on, {self.first_token_pos} was asked for"
        want = self.num_layers * max(0, commit.num_tokens - self.first_token_pos)
        have = sum((p.layer_end - p.layer_start) * (p.token_end - p.token_start) for p in self.arrived.values())
        return None if have == want else f"pieces cover {have} layer-tokens of {want}"
