"""The prefill node's end of one hand-over: asks candidates, has pieces sent, commits to one decode node. Pure.

States and moves: `handover_table.py`. What the transport is given: `piece_stream.py`.
The job that owns a hand-over hears of it through two callbacks: `on_state` after every move, whose actions follow the
hand-over's own, and `on_reading` when the transport begins or ends to read the job's blocks. Nothing else has to be
called after an event.

Protocol rules 4, 20, 21, 23 to 25, 27, 28. Every candidate asked gets a generation of its own, which a repeated
Reserve keeps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.actions import Action, Send, StopPieces
from kvferry.common.cluster.table import Machine
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.messages import (
    Abort,
    Candidate,
    Commit,
    CommitRefused,
    Committed,
    Granted,
    Job,
    Queued,
    Refused,
    Reserve,
    Revoke,
)
from kvferry.prefill_node.handover_table import (
    RESERVING,
    SEND_FAILURE_IGNORED,
    SEND_TABLE,
    UNCOMMITTED,
    SendEvent,
    SendState,
)
from kvferry.prefill_node.piece_stream import PieceStream

Answer = Granted | Queued | Refused | Committed | CommitRefused | Revoke
"""What a decode node says of a hand-over."""


class DecodePeers(Protocol):
    """What a hand-over asks about decode nodes; `decode_links.py` answers."""

    def may_live(self, candidate: Candidate) -> bool:
        """False when another incarnation, or none, is known to be at its address."""
        ...

    def is_up(self, peer: Incarnation) -> bool: ...

    def can_stage(self, peer: Incarnation) -> bool:
        """Whether this node can write into the peer's staging slots."""
        ...


@dataclass(frozen=True, slots=True)
class HandoverContext:
    """What all hand-overs of a node share."""

    self_id: Incarnation
    shape: KvShape
    timers: Timers
    limits: Limits
    new_transfer_no: Callable[[], int]
    peers: DecodePeers


@dataclass(frozen=True, slots=True)
class NextToken:
    """The token from which decoding continues."""

    token_id: int
    num_tokens: int
    """Positions with KV before it."""
    cached_tokens: int


@dataclass(slots=True)
class HandoverSender:
    """One attempt's hand-over."""

    context: HandoverContext
    job: Job
    worker: Incarnation
    deadline: float
    """Of the request, in local seconds."""
    accepted_at: float
    block_table: tuple[int, ...]
    on_state: Callable[[SendState, float], list[Action]]
    on_reading: Callable[[bool], None]
    candidates: list[Candidate] = field(init=False)
    """Not asked yet, best first."""
    machine: Machine[SendState, SendEvent] = field(init=False)
    key: TransferKey | None = None
    transfer_no: int = 0
    failure: str = ""
    commit_sent: bool = False
    target: Candidate | None = None
    may_send: bool = False
    """It has one of the transfer slots, which are bounded per peer and node."""
    last_activity: float = 0.0
    """When the decode node or the transport last said something of it."""
    _generation: int = 0
    _stream: PieceStream = field(init=False)
    _next: NextToken | None = None
    _asked_at: float = 0.0
    _sent_at: float = 0.0

    def __post_init__(self) -> None:
        self.candidates = [one for one in self.job.candidates if one.incarnation != self.context.self_id]
        target_bytes = self.context.limits.piece_target_bytes
        self._stream = PieceStream(self.context.shape, target_bytes, self.block_table, self.on_reading)
        self.machine = Machine(SEND_TABLE, f"{self.job.request_id[:8]}/{self.job.attempt}")

    @property
    def state(self) -> SendState:
        return self.machine.state

    @property
    def is_reading(self) -> bool:
        """Whether the transport may still read the job's blocks."""
        return self._stream.is_reading

    @property
    def wants_slot(self) -> bool:
        """Granted, and waiting for a transfer slot."""
        return self.state is SendState.GRANTED and not self.may_send

    @property
    def granted(self) -> bool:
        """A decode node has reserved blocks for it."""
        return self.state in (SendState.GRANTED, SendState.COMMITTING, SendState.COMMITTED, SendState.COMPLETE)

    @property
    def is_sending(self) -> bool:
        """Takes up a transfer slot."""
        return self.may_send and (self.state is SendState.GRANTED or self.is_reading)

    # -- what the job does

    def ask(self, now: float) -> list[Action]:
        """Ask the next candidate; with none left the hand-over fails with `no_room`."""
        actions = self._withdraw()
        self.candidates = [candidate for candidate in self.candidates if self.context.peers.may_live(candidate)]
        if not self.candidates:
            return actions + self._fail(self.failure or "no_room", now)
        self.target = self.candidates.pop(0)
        self._generation += 1
        self.key = TransferKey(
            self.job.request_id, self.job.attempt, self._generation, self.context.self_id, self.target.incarnation
        )
        self.transfer_no = self.context.new_transfer_no()
        self.may_send = False
        self._stream.restart()
        self._asked_at = now
        return [*actions, *self._move(SendEvent.ASK, now), *self._send_reserve(now)]

    def progress(self, token_start: int, token_end: int, layers: int, now: float) -> list[Action]:
        """Positions token_start .. token_end - 1 have KV in the first `layers` layers."""
        self._stream.progress(token_start, token_end, layers)
        return self._push(now)

    def token_known(self, token: NextToken, now: float) -> list[Action]:
        """The prompt is computed, and this token comes next."""
        self._next = token
        return self._push(now)

    def give_slot(self, now: float) -> list[Action]:
        """Sending may begin."""
        self.may_send = True
        return self._push(now)

    def abort(self, now: float) -> list[Action]:
        """The request is not wanted any more, or its first token was its last."""
        if self.state is SendState.ABORTED:
            return []
        actions = self._withdraw() or self._stream.stop()
        return actions + self._move(SendEvent.ABORT, now)

    def release(self, now: float) -> list[Action]:
        """The job has paused: release the reservation. `ask` begins with the same candidate again."""
        if not self.machine.accepts(SendEvent.RELEASE):
            return []
        assert self.target is not None
        actions = self._withdraw()
        self.candidates.insert(0, self.target)
        self.key, self.may_send = None, False
        return actions + self._move(SendEvent.RELEASE, now)

    def forget_pieces(self) -> None:
        """The job's blocks are released: no piece can be sent again."""
        self._stream.forget()

    # -- what the decode node says

    def on_answer(self, message: Answer, now: float) -> list[Action]:
        self.last_activity = now
        match message:
            case Granted():
                return self._on_granted(message, now)
            case Queued(key=key):
                queued = key == self.key and self.machine.accepts(SendEvent.QUEUED)
                return self._move(SendEvent.QUEUED, now) if queued else []
            case Refused(key=key, reason=reason) | CommitRefused(key=key, reason=reason):
                return self._on_refused(key, reason, now)
            case Revoke(key=key):
                return self._on_refused(key, "revoked", now) or [self._abort_of(key)]
            case Committed():
                return self._on_committed(message, now)
            case _:
                assert_never(message)

    def _on_granted(self, message: Granted, now: float) -> list[Action]:
        """Blocks are reserved. A grant for an earlier key is released again."""
        if message.key != self.key or not self.machine.accepts(SendEvent.GRANTED):
            return [] if message.key == self.key and self.granted else [self._abort_of(message.key)]
        self._stream.granted(message.first_token, message.slots)
        return [*self._move(SendEvent.GRANTED, now), *self._push(now)]

    def _on_refused(self, key: TransferKey, reason: str, now: float) -> list[Action]:
        """Ask the next candidate, at no cost. A refusal after the Commit ends the attempt's hand-over."""
        if key != self.key:
            return []
        if self.state in RESERVING:
            self.failure = "no_room"
            return self.ask(now)
        if self.state is SendState.COMMITTING:
            return self._fail(reason, now)
        return []

    def _on_committed(self, message: Committed, now: float) -> list[Action]:
        """The decode node owns the request; it may still lack pieces."""
        if message.key != self.key or not self.machine.accepts(SendEvent.COMMITTED):
            return []
        owned = self._move(SendEvent.COMMITTED, now)
        if message.complete:
            return owned + self._move(SendEvent.COMPLETE, now)
        self._stream.ask_again(message.key, message.missing)
        return [*self._give_again(), *self._say_waiting(), *owned]

    def on_peer_up(self, now: float) -> list[Action]:
        """The link to the candidate is there now: repeat the Reserve, whose answer may have been lost with the last."""
        return self._send_reserve(now) if self.state in (SendState.ASKING, SendState.QUEUED) else []

    def on_peer_lost(self, now: float) -> list[Action]:
        """The decode node's incarnation has ended."""
        if self.state in RESERVING:
            return self.ask(now)
        if self.state is SendState.COMMITTING:
            return self._fail("lost", now)
        actions = self._stream.stop()
        if self.machine.accepts(SendEvent.COMPLETE):
            actions += self._move(SendEvent.COMPLETE, now)
        return actions

    # -- what the transport says

    def may_write(self, key: TransferKey) -> bool:
        """Whether pieces of this key may be read, or written to staging slots, now or later."""
        return self._stream.may_write(key)

    def on_sent(self, key: TransferKey, number: int, now: float) -> list[Action]:
        """The piece's blocks were read; where it went to a staging slot, the write was confirmed."""
        self.last_activity = now
        if not self._stream.sent(key, number):
            return []
        return [*self._stream.end_writing(key), *self._push(now)]

    def on_stopped(self, key: TransferKey, now: float) -> list[Action]:
        """The transport reads nothing more for this key."""
        self.last_activity = now
        self._stream.stopped(key)
        return [*self._stream.end_writing(key), *self._give_again()]

    def on_send_failed(self, key: TransferKey, now: float) -> list[Action]:
        """The transport cannot reach the node. After the Commit it stops, and what is asked for is given again."""
        self.last_activity = now
        if self.state is SendState.COMMITTED and key == self.key and self._stream.fail(key):
            return [StopPieces(key)]
        if key != self.key or self.state in SEND_FAILURE_IGNORED:
            return []
        return self._fail("lost", now) if self.state is SendState.COMMITTING else self.ask(now)

    # -- time

    def tick(self, now: float) -> list[Action]:
        """Repeat what was not answered; give up what waited too long."""
        timers, since = self.context.timers, now - self._asked_at
        if self.state is SendState.ASKING and (since > timers.reserve_timeout_s or self._target_is_gone):
            return self.ask(now)
        if self.state is SendState.QUEUED and since > timers.queued_wait_s and self._has_other:
            self.failure = "no_room"
            return self.ask(now)
        if self.state is SendState.COMMITTING and since > timers.commit_timeout_s:
            return self._fail("commit_unanswered", now)
        retransmit_s = timers.queued_wait_s if self.state is SendState.QUEUED else timers.retransmit_s
        target_up = self.key is not None and self.context.peers.is_up(self.key.decode)
        if not target_up or now - self._sent_at < retransmit_s:
            return []
        if self.state in (SendState.ASKING, SendState.QUEUED):
            return self._send_reserve(now)
        return self._send_commit(now) if self.state is SendState.COMMITTING else []

    # -- inside

    def _move(self, event: SendEvent, now: float) -> list[Action]:
        return self.on_state(self.machine.move(event, now), now)

    @property
    def _target_is_gone(self) -> bool:
        """Another incarnation, or none, is known to be at the address of a candidate that was never linked."""
        return self.target is not None and not self.context.peers.may_live(self.target)

    @property
    def _has_other(self) -> bool:
        """Whether a candidate was not asked yet. Without one a place in the queue is kept: a request that leaves
        begins at the end of the next queue, and one that needs many blocks would never stay at a head long enough."""
        return any(self.context.peers.may_live(candidate) for candidate in self.candidates)

    def _send_reserve(self, now: float) -> list[Action]:
        assert self.key is not None
        self._sent_at = now
        reserve = Reserve(
            key=self.key,
            transfer_no=self.transfer_no,
            placement_no=self.job.placement_no,
            worker=self.worker,
            spec=self.job.spec,
            remaining_ms=max(0, int((self.deadline - now) * 1000)),
            waited_ms=max(0, int((now - self.accepted_at) * 1000)),
            staged=self.context.peers.can_stage(self.key.decode),
        )
        return [Send(self.key.decode, reserve)]

    def _send_commit(self, now: float) -> list[Action]:
        self._sent_at = now
        return [self._commit()]

    def _commit(self, waiting: tuple[int, ...] = ()) -> Send:
        assert self.key is not None
        assert self._next is not None
        commit = Commit(
            key=self.key,
            num_pieces=self._stream.num_pieces,
            first_token_pos=self._stream.first_token_pos,
            num_tokens=self._next.num_tokens,
            token_id=self._next.token_id,
            cached_tokens=self._next.cached_tokens,
            waiting=waiting,
        )
        return Send(self.key.decode, commit)

    def _push(self, now: float) -> list[Action]:
        """Give the transport all that is computed and not given yet; commit if that was all.

        With staging slots the Commit waits until the transport has confirmed every write.
        """
        if self.state is not SendState.GRANTED or not self.may_send:
            return []
        assert self.key is not None
        actions = self._stream.give_new(self.key)
        if not self._stream.is_confirmed(self.key):
            return actions
        if self._next is not None and self._stream.all_given(self._next.num_tokens):
            self._asked_at, self.commit_sent = now, True
            actions += [*self._move(SendEvent.COMMIT, now), *self._send_commit(now)]
        return actions

    def _give_again(self) -> list[Action]:
        if self.state is not SendState.COMMITTED or self.key is None:
            return []
        return self._stream.give_again(self.key)

    def _say_waiting(self) -> list[Action]:
        """Keep the decode node from giving up pieces that it asked for and that still wait in the transport."""
        waiting = () if self.key is None else self._stream.waiting(self.key)
        return [self._commit(waiting)] if waiting else []

    def _abort_of(self, key: TransferKey) -> Send:
        return Send(key.decode, Abort(key=key, stopped=not self.may_write(key)))

    def _withdraw(self) -> list[Action]:
        """Release an uncommitted reservation and stop reading for it."""
        if self.key is None or self.state not in RESERVING:
            return []
        return self._stream.withdraw(self.key)

    def _fail(self, reason: str, now: float) -> list[Action]:
        self.failure = reason
        return [*self._stream.stop(), *self._move(SendEvent.FAIL, now)]

    def check_invariants(self) -> None:
        """Raises InvariantError when the state and what was sent disagree."""
        if self.commit_sent and self.state in UNCOMMITTED:
            raise InvariantError(f"a Commit was sent but the hand-over is {self.state.name}")
        if self.granted and self.key is None:
            raise InvariantError("granted without a key")
        unconfirmed = self.key is not None and not self._stream.is_confirmed(self.key)
        if self.commit_sent and unconfirmed and self.state is SendState.COMMITTING:
            raise InvariantError("a Commit was sent before every write was confirmed")
        self._stream.check_invariants()
