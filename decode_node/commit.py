"""How the decode node comes to own a request: Commit, pieces, and what is asked for again. Pure. Rules 24 and 25."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvferry.common.base.errors import ProtocolError
from kvferry.common.base.ids import TransferKey
from kvferry.common.cluster.actions import (
    Action,
    Send,
)
from kvferry.common.cluster.clients import (
    Client,
    ClientTable,
)
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Commit, CommitRefused, Committed, Piece
from kvferry.common.scheduling.events import SchedulerEvent
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.decode_node.entries import Entry, EntryTable
from kvferry.decode_node.receive_table import (
    ReceiveEvent,
    ReceiveState,
)


@dataclass(slots=True)
class CommitResult:
    """What a step towards ownership led to: actions, and the events of the sequence that began to decode."""

    actions: list[Action]
    events: list[SchedulerEvent]


@dataclass(slots=True)
class CommitHandler:
    """Owned by the Commit; running when every piece is there and right."""

    entries: EntryTable
    scheduler: Scheduler
    timers: Timers
    clients: Callable[[], ClientTable]

    def on_commit(self, client: Client, message: Commit, now: float) -> CommitResult:
        """The request is this node's from now on; the answer is the same each time."""
        entry = self.entries.by_key.get(message.key)
        if entry is None or entry.ledger is None:
            return _only(Send(client.incarnation, CommitRefused(key=message.key, reason="not_reserved")))
        if entry.commit is not None:
            entry.ledger.hear_of(message.waiting, now)
            return _only(_committed(entry))
        if message.num_pieces > entry.ledger.num_layers * entry.spec.num_known:
            refused = Send(client.incarnation, CommitRefused(key=message.key, reason="more pieces than there is KV"))
            return CommitResult([*self.entries.drop(entry, now), refused], [])
        entry.commit, entry.cached_tokens = message, message.cached_tokens
        entry.ledger.last_arrival = now
        entry.machine.move(ReceiveEvent.COMMIT, now)
        assert entry.seq_id is not None
        self.scheduler.commit(entry.seq_id)
        if not entry.ledger.missing(message):
            return self._complete(entry, now)
        if entry.ledger.damaged:
            return CommitResult(self._ask_again(entry, set(entry.ledger.damaged), "damaged pieces", now), [])
        return _only(_committed(entry))

    def on_piece(self, piece: Piece, now: float) -> CommitResult:
        """A piece was written."""
        entry = self.entries.by_key.get(piece.key)
        if entry is None or entry.ledger is None or entry.state is ReceiveState.RUNNING or entry.is_record:
            return CommitResult([], [])
        entry.ledger.add(piece, now)
        if entry.commit is None or len(entry.ledger.arrived) < entry.commit.num_pieces:
            return CommitResult([], [])  # what is missing is looked up once, not for each of thousands of pieces
        if entry.ledger.missing(entry.commit):
            return CommitResult([], [])
        return self._complete(entry, now)

    def on_damaged(self, key: TransferKey, number: int, reason: str, now: float) -> list[Action]:
        """A piece came damaged: asked for at once if the Commit is there, else with it."""
        entry = self.entries.by_key.get(key)
        if entry is None or entry.ledger is None or number in entry.ledger.arrived:
            return []
        if entry.state not in (ReceiveState.RESERVED, ReceiveState.OWNED):
            return []
        again = number in entry.ledger.spoiled
        entry.ledger.add_damaged(number, now)
        if entry.state is ReceiveState.RESERVED:
            return []
        return self.entries.lose(entry, reason, now) if again else self._ask_again(entry, {number}, reason, now)

    def tick(self, entry: Entry, now: float) -> list[Action]:
        """Pieces that do not come are asked for once; then the request is lost here. While the sender says that they
        wait to be sent, they count as not asked for: it knows whether its transport goes on.

        A sender that is gone is not asked: what it had sent comes within the time of its silence, or never.
        """
        if entry.state is not ReceiveState.OWNED or entry.ledger is None or entry.commit is None:
            return []
        patience_s = self.timers.piece_idle_timeout_s
        if self._sender_is_gone(entry):
            patience_s = min(patience_s, self.timers.client_timeout_s)
        if now - entry.ledger.last_arrival <= patience_s:
            return []
        return self._ask_again(entry, entry.ledger.missing(entry.commit), "pieces did not come", now)

    def _complete(self, entry: Entry, now: float) -> CommitResult:
        """Start decoding, if the pieces are right as a whole."""
        assert entry.commit is not None
        assert entry.ledger is not None
        assert entry.seq_id is not None
        fault = entry.ledger.fault(entry.commit)
        if fault is not None:
            return CommitResult(self.entries.lose(entry, fault, now), [])
        commit = entry.commit
        try:
            events = self.scheduler.activate(entry.seq_id, commit.token_id, commit.num_tokens, now)
        except ProtocolError as error:
            return CommitResult(self.entries.lose(entry, str(error), now), [])
        entry.machine.move(ReceiveEvent.COMPLETE, now)
        return CommitResult([*self.entries.stop_writing(entry, now), _committed(entry)], events)

    def _ask_again(self, entry: Entry, numbers: Collection[int], why: str, now: float) -> list[Action]:
        assert entry.ledger is not None
        if self._sender_is_gone(entry) or not entry.ledger.ask(numbers, now):
            return self.entries.lose(entry, why, now)
        return [_committed(entry, tuple(sorted(numbers)))]

    def _sender_is_gone(self, entry: Entry) -> bool:
        return self.clients().get(entry.key.prefill) is None


def _only(action: Action) -> CommitResult:
    return CommitResult([action], [])


def _committed(entry: Entry, missing: tuple[int, ...] = ()) -> Send:
    complete = entry.state is not ReceiveState.OWNED
    return Send(entry.key.prefill, Committed(key=entry.key, complete=complete, missing=missing))
