"""The decode node's end of a hand-over: room, pieces, ownership, and the request's life after it. Pure.

QUEUED      no room yet; the reservation waits
RESERVED    blocks are kept, pieces may be written
OWNED       committed: this node answers for the request, but pieces are missing still
RUNNING     every piece is there and right: it decodes
FINISHED    its last token was drawn
FAILED      no token could be drawn
REVOKED  granted and not kept; its prefill node knows, or will
PREEMPTED  preempted, or drained: it goes on elsewhere
LOST        it cannot go on here: pieces or time are missing
The last four are records without blocks, kept until the worker's list no longer has them.
A request whose prompt was computed in this very process is RUNNING at once: it has its blocks, and no pieces come.

Protocol rules 15, 16, 23 to 27.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.common.cluster.table import Table
from kvferry.common.protocol.messages import Commit, Piece


class ReceiveState(Enum):
    """Where a hand-over is, at its receiver."""

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
    """What moves it. Leaving the table altogether (abort, reaping) needs no row."""

    GRANT = auto()
    """There is room."""
    REVOKE = auto()
    """The decode node does not keep what it granted. A copy of the Reserve must not be granted anew: pieces that were
    sent for the first grant would be taken for the second one's."""
    COMMIT = auto()
    """The prefill node hands it over."""
    ADOPT = auto()
    """The prefill role of this process has computed it."""
    COMPLETE = auto()
    """The last missing piece is there, and all are right."""
    FINISH = auto()
    """Its last token was drawn."""
    FAIL = auto()
    """No token could be drawn."""
    PREEMPT = auto()
    """Preempted, or the drain took too long."""
    LOSE = auto()
    """Pieces did not come or are wrong, or its deadline passed."""


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
    """Which pieces of one transfer key are there and right, and which were asked for again."""

    num_layers: int
    first_token_pos: int
    arrived: dict[int, Piece] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    """Came damaged, and not right since."""
    asked: set[int] = field(default_factory=set)
    """Asked for once more already."""
    spoiled: set[int] = field(default_factory=set)
    """Came damaged at least once."""
    last_arrival: float = 0.0

    def add(self, piece: Piece, now: float) -> None:
        """A piece was written; a second copy changes nothing."""
        self.arrived[piece.number] = piece
        self.damaged.discard(piece.number)
        self.last_arrival = now

    def add_damaged(self, number: int, now: float) -> None:
        """A piece came that was not right."""
        self.damaged.add(number)
        self.spoiled.add(number)
        self.last_arrival = now

    def missing(self, commit: Commit) -> tuple[int, ...]:
        """Numbers that the Commit counts and that are not there."""
        return tuple(number for number in range(commit.num_pieces) if number not in self.arrived)

    def ask(self, numbers: Collection[int], now: float) -> bool:
        """Note that these are asked for once more; False when one of them was already."""
        if self.asked.intersection(numbers):
            return False
        self.asked.update(numbers)
        self.damaged.difference_update(numbers)
        self.last_arrival = now
        return True

    def hear_of(self, waiting: Collection[int], now: float) -> None:
        """Its sender has these, and they come in their turn: they count as not asked for."""
        if waiting:
            self.asked.difference_update(waiting)
            self.last_arrival = now

    def fault(self, commit: Commit) -> str | None:
        """With all pieces there: what is wrong with them as a whole. None: they cover exactly what was lacked."""
        if commit.first_token_pos != self.first_token_pos:
            return f"carries positions from {commit.first_token_pos} on, {self.first_token_pos} was asked for"
        want = self.num_layers * max(0, commit.num_tokens - self.first_token_pos)
        have = sum((p.layer_end - p.layer_start) * (p.token_end - p.token_start) for p in self.arrived.values())
        return None if have == want else f"pieces cover {have} layer-tokens of {want}"
