"""How the decode node comes to own a request: Commit, pieces, and pieces asked for again. Pure. Rules 24 and 25."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvferry.common.base.errors import ProtocolError
from kvferry.common.base.ids import TransferKey
from kvferry.common.cluster.actions import Action, Send
from kvferry.common.cluster.clients import Client, ClientTable
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Commit, CommitRefused, Committed, Piece
from kvferry.common.scheduling.events import SchedulerEvent
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.decode_node.entries import Entry, EntryTable
from kvferry.decode_node.receive_table import ReceiveEvent, ReceiveState


@dataclass(slots=True)
class CommitHandler:
    """A request is owned from the Commit on, and decodes once every piece has arrived undamaged."""

    entries: EntryTable
    scheduler: Scheduler
    timers: Timers
    clients: ClientTable
    on_sequence: Callable[[SchedulerEvent, float], list[Action]]
    """What the scheduler reports of a sequence that begins to decode."""

    def on_commit(self, client: Client, message: Commit, now: float) -> list[Action]:
        """Own the request from now on. A repeated Commit gets the same answer."""
        entry = self.entries.by_key.get(message.key)
        if entry is None or entry.ledger is None:
            return [Send(client.incarnation, CommitRefused(key=message.key, reason="not_reserved"))]
        if entry.commit is not None:
            entry.ledger.hear_of(message.waiting, now)
            return [_committed(entry)]
        if message.num_pieces > entry.ledger.num_layers * entry.sequence.num_known:
            refused = Send(client.incarnation, CommitRefused(key=message.key, reason="more pieces than there is KV"))
            return [*self.entries.drop(entry, now), refused]
        entry.commit, entry.cached_tokens = message, message.cached_tokens
        entry.ledger.last_arrival = now
        entry.machine.move(ReceiveEvent.COMMIT, now)
        assert entry.seq_id is not None
        self.scheduler.commit(entry.seq_id)
        if not entry.ledger.missing(message):
            return self._complete(entry, now)
        if entry.ledger.damaged:
            return self._ask_again(entry, set(entry.ledger.damaged), "damaged pieces", now)
        return [_committed(entry)]

    def on_piece(self, piece: Piece, now: float) -> list[Action]:
        """A piece was written."""
        entry = self.entries.by_key.get(piece.key)
        if entry is None or entry.ledger is None or entry.state is ReceiveState.RUNNING or entry.has_ended:
            return []
        entry.ledger.add(piece, now)
        # Missing pieces are looked up only when their count fits, not for each of thousands of pieces.
        if entry.commit is None or len(entry.ledger.arrived) < entry.commit.num_pieces:
            return []
        return [] if entry.ledger.missing(entry.commit) else self._complete(entry, now)

    def on_damaged(self, key: TransferKey, number: int, reason: str, now: float) -> list[Action]:
        """A piece arrived damaged: ask for it again, together with the Commit's answer if that has not come yet."""
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
        """Ask once for pieces that do not arrive; after that the request is lost here. Pieces that wait at the sender,
        as it says, count as not asked for: the sender knows whether its transport makes progress.

        A sender that is gone is not asked: what it sent arrives within the time of its silence, or never.
        """
        if entry.state is not ReceiveState.OWNED or entry.ledger is None or entry.commit is None:
            return []
        wait_s = self.timers.piece_idle_timeout_s
        if self._sender_is_gone(entry):
            wait_s = min(wait_s, self.timers.client_timeout_s)
        if now - entry.ledger.last_arrival <= wait_s:
            return []
        return self._ask_again(entry, entry.ledger.missing(entry.commit), "pieces did not arrive", now)

    def _complete(self, entry: Entry, now: float) -> list[Action]:
        """Start decoding, if the pieces are right as a whole."""
        assert entry.commit is not None
        assert entry.ledger is not None
        assert entry.seq_id is not None
        commit = entry.commit
        fault = entry.ledger.fault(commit)
        if fault is not None:
            return self.entries.lose(entry, fault, now)
        try:
            events = self.scheduler.activate(entry.seq_id, commit.token_id, commit.num_tokens, now)
        except ProtocolError as error:
            return self.entries.lose(entry, str(error), now)
        entry.machine.move(ReceiveEvent.COMPLETE, now)
        actions = [*self.entries.stop_writing(entry, now), _committed(entry)]
        for event in events:
            actions += self.on_sequence(event, now)
        return actions

    def _ask_again(self, entry: Entry, numbers: Collection[int], why: str, now: float) -> list[Action]:
        assert entry.ledger is not None
        if self._sender_is_gone(entry) or not entry.ledger.ask(numbers, now):
            return self.entries.lose(entry, why, now)
        return [_committed(entry, tuple(sorted(numbers)))]

    def _sender_is_gone(self, entry: Entry) -> bool:
        return self.clients.get(entry.key.prefill) is None


def _committed(entry: Entry, missing: tuple[int, ...] = ()) -> Send:
    complete = entry.state is not ReceiveState.OWNED
    return Send(entry.key.prefill, Committed(key=entry.key, complete=complete, missing=missing))
