"""What the sender of a hand-over asks about decode nodes. A type only; `prefill_node/decode_links.py` answers.

The prefill node's end of a hand-over: asks candidates, pushes pieces, commits to one. Pure.

States and moves: `handover_send_table.py`. What the pieces are: `piece_plan.py`.

Protocol rules 4, 20, 21, 23 to 25, 27, 28 live here. Every Reserve is a generation of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import (
    Incarnation,
    TransferKey,
)
from kvferry.common.cluster.actions import (
    Action,
    Send,
    SendPiece,
    StopPieces,
)
from kvferry.common.cluster.table import Machine
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.messages import Abort, Candidate, Commit, Committed, Piece, Reserve
from kvferry.prefill_node.handover_table import (
    FINAL,
    SEND_TABLE,
    UNCOMMITTED,
    SendEvent,
    SendState,
)
from kvferry.prefill_node.pieces import (
    PiecePlan,
    PiecesOut,
)


class DecodePeers(Protocol):
    """What is known of decode nodes."""

    def may_live(self, candidate: Candidate) -> bool:
        """False when another life, or none, is known to be at its address."""
        ...

    def can_stage(self, peer: Incarnation) -> bool:
        """Whether this life's staging slots can be written from here."""
        ...


@dataclass(frozen=True, slots=True)
class NextToken:
    """The token that decoding goes on from."""

    token_id: int
    index: int
    """Its output index."""
    num_tokens: int
    """Positions with KV before it."""
    cached_tokens: int


@dataclass(slots=True)
class HandoverSender:
    """One attempt's hand-over."""

    self_id: Incarnation
    reserve: Reserve
    """A template: key, transfer_no and times are filled at each sending."""
    candidates: list[Candidate]
    shape: KvShape
    timers: Timers
    limits: Limits
    new_transfer_no: Callable[[], int]
    peers: DecodePeers
    deadline: float
    accepted_at: float
    machine: Machine[SendState, SendEvent] = field(init=False)
    key: TransferKey | None = None
    transfer_no: int = 0
    failure: str = ""
    commit_sent: bool = False
    complete: bool = False
    """The decode node has every piece."""
    target: Candidate | None = None
    block_table: tuple[int, ...] = ()
    may_send: bool = False
    """A transfer slot was given (bounded per peer and node)."""
    _generation: int = 0
    _plan: PiecePlan = field(init=False)
    _out: PiecesOut = field(default_factory=PiecesOut)
    _slots: tuple[int, ...] = ()
    """Staging slots that were granted for the present key."""
    _stop_owed: set[TransferKey] = field(default_factory=set)
    """Given up while writes were under way: Abort(stopped) follows when the transport has stopped."""
    _next: NextToken | None = None
    _asked_at: float = 0.0
    _sent_at: float = 0.0

    def __post_init__(self) -> None:
        self._plan = PiecePlan(self.shape, self.limits.piece_target_bytes)
        self.machine = Machine(SEND_TABLE, f"{self.reserve.key.request_id[:8]}/{self.reserve.key.attempt}")

    @property
    def state(self) -> SendState:
        """The present state."""
        return self.machine.state

    @property
    def pieces_in_flight(self) -> int:
        """Pieces whose blocks the transport may still read."""
        return len(self._out)

    @property
    def wants_slot(self) -> bool:
        """Granted, and waiting for its turn to send."""
        return self.state is SendState.GRANTED and not self.may_send

    @property
    def granted(self) -> bool:
        """A decode node holds room for it."""
        return self.state in (SendState.GRANTED, SendState.COMMITTING, SendState.COMMITTED)

    @property
    def is_sending(self) -> bool:
        """Takes up a transfer slot."""
        return self.may_send and (self.state is SendState.GRANTED or self.pieces_in_flight > 0)

    # -- commands of the role

    def ask(self, now: float) -> list[Action]:
        """Ask the next candidate; none left: the hand-over fails with no_room."""
        actions = self._withdraw()
        self.candidates = [candidate for candidate in self.candidates if self.peers.may_live(candidate)]
        if not self.candidates:
            return actions + self._fail(self.failure or "no_room", now)
        self.target = self.candidates.pop(0)
        self._generation += 1
        old = self.reserve.key
        self.key = TransferKey(old.request_id, old.attempt, self._generation, self.self_id, self.target.incarnation)
        self.transfer_no = self.new_transfer_no()
        self.may_send, self._slots = False, ()
        self._plan.restart()
        self.machine.move(SendEvent.ASK, now)
        self._asked_at = now
        return actions + self._send_reserve(now)

    def progress(self, token_start: int, token_end: int, layers: int, now: float) -> list[Action]:
        """Positions token_start .. token_end - 1 have KV in the first `layers` layers."""
        self._plan.progress(token_start, token_end, layers)
        return self._push(now)

    def token_known(self, token: NextToken, now: float) -> list[Action]:
        """All is computed and this token comes next."""
        self._next = token
        return self._push(now)

    def give_slot(self, now: float) -> list[Action]:
        """Sending may begin."""
        self.may_send = True
        return self._push(now)

    def abort(self, now: float) -> list[Action]:
        """The request is not wanted any more, or ended with its first token."""
        if self.state is SendState.ABORTED:
            return []
        actions = self._withdraw() or self._stop()
        self.machine.move(SendEvent.ABORT, now)
        return actions

    def release(self, now: float) -> list[Action]:
        """Nothing goes on for a while: give the room back. `ask` begins with the same candidate again."""
        if not self.machine.accepts(SendEvent.RELEASE):
            return []
        assert self.target is not None
        actions = self._withdraw()
        self.candidates.insert(0, self.target)
        self.key, self.may_send = None, False
        self.machine.move(SendEvent.RELEASE, now)
        return actions

    def forget_pieces(self) -> None:
        """The blocks are let go of: no piece can be sent again."""
        self._plan.forget()

    # -- what the decode node says

    def on_granted(
        self, key: TransferKey, first_token: int, now: float, slots: tuple[int, ...] = ()
    ) -> list[Action] | None:
        """Room is there. None: not ours any more, answer Abort."""
        if key != self.key or not self.machine.accepts(SendEvent.GRANTED):
            return [] if key == self.key and self.granted else None
        self._plan.first_token_pos, self._slots = first_token, slots
        self.machine.move(SendEvent.GRANTED, now)
        return self._push(now)

    def on_queued(self, key: TransferKey, now: float) -> None:
        """Room will come."""
        if key == self.key and self.machine.accepts(SendEvent.QUEUED):
            self.machine.move(SendEvent.QUEUED, now)

    def on_refused(self, key: TransferKey, reason: str, now: float) -> list[Action]:
        """Not there: the next one, at no cost. A refusal after the Commit ends the attempt's hand-over."""
        if key != self.key:
            return []
        if self.state in (SendState.ASKING, SendState.QUEUED, SendState.GRANTED):
            self.failure = "no_room"
            return self.ask(now)
        if self.state is SendState.COMMITTING:
            return self._fail(reason, now)
        return []

    def on_committed(self, message: Committed, now: float) -> list[Action]:
        """Owned over there; it may still lack pieces."""
        if message.key != self.key or not self.machine.accepts(SendEvent.COMMITTED):
            return []
        self.machine.move(SendEvent.COMMITTED, now)
        self.complete = self.complete or message.complete
        self._out.ask_again(message.key, message.missing)
        return [*self._give_again(), *self._say_waiting()]

    def on_peer_up(self, now: float) -> list[Action]:
        """The link to the candidate is there now: ask at once. An answer may have been lost with an earlier one."""
        return self._send_reserve(now) if self.state in (SendState.ASKING, SendState.QUEUED) else []

    def on_peer_lost(self, now: float) -> list[Action]:
        """The decode node's life ended."""
        if self.state in (SendState.ASKING, SendState.QUEUED, SendState.GRANTED):
            return self.ask(now)
        if self.state is SendState.COMMITTING:
            return self._fail("lost", now)
        self.complete = True
        return self._stop()

    # -- what the transport says

    def may_write(self, key: TransferKey) -> bool:
        """Whether pieces of this key may be read, or written to staging slots, now or later."""
        return key in self._out

    def on_sent(self, key: TransferKey, number: int, now: float) -> list[Action]:
        """The piece's blocks have been read; where it went to a staging slot, the write was confirmed."""
        if not self._out.sent(key, number):
            return []
        return [*self._end_reading(key), *self._push(now)]

    def on_stopped(self, key: TransferKey) -> list[Action]:
        """Nothing is read for this key any more."""
        self._out.stopped(key)
        return [*self._end_reading(key), *self._give_again()]

    def on_send_failed(self, key: TransferKey, now: float) -> list[Action]:
        """The transport cannot reach the node. After the Commit it stops, and what is asked for is given again."""
        if self.state is SendState.COMMITTED and key == self.key and self._out.fail(key):
            return [StopPieces(key)]
        if key != self.key or self.state in FINAL:
            return []
        return self._fail("lost", now) if self.state is SendState.COMMITTING else self.ask(now)

    # -- time

    def tick(self, now: float, *, target_up: bool) -> list[Action]:
        """Repeat what was not answered; give up what waited too long."""
        since = now - self._asked_at
        if self.state is SendState.ASKING and (since > self.timers.reserve_timeout_s or self._target_is_gone):
            return self.ask(now)
        if self.state is SendState.QUEUED and since > self.timers.queued_wait_s and self._has_other:
            self.failure = "no_room"
            return self.ask(now)
        if self.state is SendState.COMMITTING and since > self.timers.commit_timeout_s:
            return self._fail("commit_unanswered", now)
        patience_s = self.timers.queued_wait_s if self.state is SendState.QUEUED else self.timers.retransmit_s
        repeat = target_up and now - self._sent_at >= patience_s
        if repeat and self.state in (SendState.ASKING, SendState.QUEUED):
            return self._send_reserve(now)
        if repeat and self.state is SendState.COMMITTING:
            return self._send_commit(now)
        return []

    # -- inside

    @property
    def _target_is_gone(self) -> bool:
        """Another life, or none, is known to be at the address of a candidate that was never linked."""
        return self.target is not None and not self.peers.may_live(self.target)

    @property
    def _has_other(self) -> bool:
        """A candidate that was not asked. Without one a place in the queue is kept: who gives it up begins at its end,
        and whoever needs much would never come to its head again for long enough."""
        return any(self.peers.may_live(candidate) for candidate in self.candidates)

    def _send_reserve(self, now: float) -> list[Action]:
        assert self.key is not None
        self._sent_at = now
        filled = msgspec.structs.replace(
            self.reserve,
            key=self.key,
            transfer_no=self.transfer_no,
            remaining_ms=max(0, int((self.deadline - now) * 1000)),
            waited_ms=max(0, int((now - self.accepted_at) * 1000)),
            staged=self.peers.can_stage(self.key.decode),
        )
        return [Send(self.key.decode, filled)]

    def _send_commit(self, now: float) -> list[Action]:
        self._sent_at = now
        return [self._commit()]

    def _commit(self, waiting: tuple[int, ...] = ()) -> Send:
        assert self.key is not None
        assert self._next is not None
        commit = Commit(
            key=self.key,
            num_pieces=len(self._plan),
            first_token_pos=self._plan.first_token_pos,
            num_tokens=self._next.num_tokens,
            token_id=self._next.token_id,
            token_index=self._next.index,
            cached_tokens=self._next.cached_tokens,
            waiting=waiting,
        )
        return Send(self.key.decode, commit)

    def _push(self, now: float) -> list[Action]:
        """Give the transport all that is computed and not given yet; then commit if that was all.

        Where there are staging slots, the Commit waits for the transport to confirm every write.
        """
        if self.state is not SendState.GRANTED or not self.may_send:
            return []
        assert self.key is not None
        actions: list[Action] = [self._give(piece, self._slots) for piece in self._plan.cut(self.key)]
        if self._unconfirmed():
            return actions
        if self._next is not None and self._plan.all_given(self._next.num_tokens):
            self.machine.move(SendEvent.COMMIT, now)
            self._asked_at, self.commit_sent = now, True
            actions += self._send_commit(now)
        return actions

    def _unconfirmed(self) -> bool:
        return bool(self._slots) and self.key is not None and self.key in self._out

    def _give(self, piece: Piece, slots: tuple[int, ...]) -> SendPiece:
        self._out.give(piece.key, piece.number)
        return SendPiece(piece.key.decode, piece, self.block_table, slots)

    def _give_again(self) -> list[Action]:
        """Into no slots: after the Commit no write is under way, so that they are free when nobody needs them more."""
        if self.state is not SendState.COMMITTED or self.complete or self.key is None:
            return []
        return [self._give(piece, ()) for piece in self._plan.numbered(self._out.ready(self.key))]

    def _say_waiting(self) -> list[Action]:
        """The decode node shall not give up what was asked for and still waits for its turn in the transport."""
        waiting = () if self.key is None or self.complete else self._out.waiting(self.key)
        return [self._commit(waiting)] if waiting else []

    def _end_reading(self, key: TransferKey) -> list[Action]:
        if key not in self._stop_owed:
            return []
        self._stop_owed.discard(key)
        return [Send(key.decode, Abort(key=key))]

    def _withdraw(self) -> list[Action]:
        """Give an open reservation back and stop reading for it."""
        if self.key is None or self.state not in (SendState.ASKING, SendState.QUEUED, SendState.GRANTED):
            return []
        stopped = not self._unconfirmed()
        if not stopped:
            self._stop_owed.add(self.key)
        return [*self._stop(), Send(self.key.decode, Abort(key=self.key, stopped=stopped))]

    def _stop(self) -> list[Action]:
        return [StopPieces(key) for key in self._out.keys]

    def _fail(self, reason: str, now: float) -> list[Action]:
        self.failure = reason
        self.machine.move(SendEvent.FAIL, now)
        return self._stop()

    def check_invariants(self) -> None:
        """Raises InvariantError when the state and what was sent disagree."""
        if self.commit_sent and self.state in UNCOMMITTED:
            raise InvariantError(f"a Commit was sent but the hand-over is {self.state.name}")
        if self.state in (SendState.GRANTED, SendState.COMMITTING, SendState.COMMITTED) and self.key is None:
            raise InvariantError("granted without a key")
        if self.commit_sent and self._unconfirmed() and self.state is SendState.COMMITTING:
            raise InvariantError("a Commit was sent before every write was confirmed")
        if not self._stop_owed <= set(self._out.keys):
            raise InvariantError("Abort(stopped) is owed for what nobody writes")
        self._out.check_invariants()
        self._plan.check_invariants()
