"""Which requests get blocks on the decode node, and which lose them again: Reserve, Grant, queue, Revoke. Pure.

Protocol rules 13, 16, 18, 27, 28.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.base.ids import AttemptKey
from kvferry.common.cluster.actions import Action, ExpectPieces, Send
from kvferry.common.cluster.clients import Client, ClientTable
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Granted, Queued, Refused, Reserve, Revoke
from kvferry.common.scheduling.waiting_queue import effective_class
from kvferry.decode_node.entries import Entry, EntryTable
from kvferry.decode_node.receive_table import PieceLedger, ReceiveEvent, ReceiveState


@dataclass(slots=True)
class Reservations:
    """Grants a request all its blocks or none, by class and age; queues or refuses the others."""

    entries: EntryTable
    timers: Timers
    limits: Limits
    num_layers: int
    clients: ClientTable
    draining: bool = False

    def on_reserve(self, client: Client, message: Reserve, now: float) -> list[Action]:
        """A repeated Reserve gets the same answer."""
        key = message.key
        actions: list[Action] = []
        present = self.entries.by_attempt.get(AttemptKey(key.request_id, key.attempt))
        if present is not None:
            if present.key == key:
                return self._answer_again(present)
            if not present.is_open or present.key.generation > key.generation:
                return [Send(client.incarnation, Refused(key=key, reason="gone"))]
            actions += self.entries.drop(present, now)
        reason = self._refusal(client, message, now)
        if reason is not None:
            return [*actions, Send(client.incarnation, Refused(key=key, reason=reason))]
        entry = Entry.from_reserve(message, now, self.timers.deadline_grace_s)
        try:
            self.entries.scheduler.check(entry.sequence)
        except RequestInvalidError as error:
            return [*actions, Send(client.incarnation, Refused(key=key, reason=str(error)))]
        self.entries.add(entry)
        return actions + self._grant_or_queue(entry, now)

    def _refusal(self, client: Client, message: Reserve, now: float) -> str | None:
        key = message.key
        if self.draining:
            return "draining"
        worker = self.clients.get(message.worker)
        if worker is None or now - worker.last_heartbeat > self.timers.worker_timeout_s:
            return "no_worker_link"
        if not worker.wants(message.placement_no, key.request_id, key.attempt):
            return "gone"
        if not client.wants(message.transfer_no, key.request_id, key.attempt, key.generation):
            return "gone"
        if len(self.entries.queued) >= self.limits.queued_reservations:
            return "full"
        return None

    def _grant_or_queue(self, entry: Entry, now: float) -> list[Action]:
        if not self.entries.queued and self._reserve(entry, now):
            return self._granted(entry)
        self.entries.queued[entry.key] = entry
        return [Send(entry.key.prefill, Queued(key=entry.key))]

    def _reserve(self, entry: Entry, now: float) -> bool:
        reservation = self.entries.scheduler.reserve(entry.sequence, now)
        if reservation is None:
            return False
        self.entries.attach(entry, reservation.seq_id)
        entry.ledger = PieceLedger(self.num_layers, reservation.first_token, last_arrival=now)
        entry.machine.move(ReceiveEvent.GRANT, now)
        return True

    def _granted(self, entry: Entry) -> list[Action]:
        assert entry.seq_id is not None
        assert entry.ledger is not None
        table = self.entries.scheduler.block_table(entry.seq_id)
        slots = self.entries.staging.grant(entry.key) if entry.staged else ()
        return [ExpectPieces(entry.key, table, entry.ledger.first_token_pos, slots), self._grant_message(entry)]

    def _grant_message(self, entry: Entry) -> Send:
        assert entry.ledger is not None
        granted = Granted(
            key=entry.key, first_token=entry.ledger.first_token_pos, slots=self.entries.staging.of(entry.key)
        )
        return Send(entry.key.prefill, granted)

    def _answer_again(self, entry: Entry) -> list[Action]:
        if entry.state is ReceiveState.QUEUED:
            return [Send(entry.key.prefill, Queued(key=entry.key))]
        if entry.state is ReceiveState.RESERVED:
            return [self._grant_message(entry)]
        if entry.revocation is not None:
            return [Send(entry.key.prefill, entry.revocation)]
        return []  # committed meanwhile: the Reserve is an old copy

    def grant_queued(self, now: float) -> list[Action]:
        """Grant queued reservations, best first, while there are blocks. No reservation overtakes the head."""
        actions: list[Action] = []
        for entry in sorted(self.entries.queued.values(), key=lambda e: self._rank(e, now)):
            if not self._reserve(entry, now):
                actions += self._make_room(entry, now)
            if entry.state is ReceiveState.QUEUED:
                break
            del self.entries.queued[entry.key]
            actions += self._granted(entry)
        return actions

    def _class(self, entry: Entry, now: float) -> int:
        return effective_class(entry.sequence.priority, entry.sequence.accepted_at, now, self.timers.aging_s)

    def _rank(self, entry: Entry, now: float) -> tuple[int, float]:
        return (self._class(entry, now), entry.sequence.accepted_at)

    # -- revoking grants

    def _make_room(self, head: Entry, now: float) -> list[Action]:
        """Revoke reservations of worse classes for the head of the queue if that suffices, the worst first."""
        level = self._class(head, now)
        victims = [e for e in self.entries if e.state is ReceiveState.RESERVED and self._class(e, now) > level]
        if not victims or not self._would_suffice(victims, head):
            return []
        actions: list[Action] = []
        for victim in sorted(victims, key=lambda e: self._rank(e, now), reverse=True):
            actions += self._revoke(victim, "priority", now)
            if self._reserve(head, now):
                break
        return actions

    def _would_suffice(self, victims: Sequence[Entry], head: Entry) -> bool:
        scheduler = self.entries.scheduler
        load = scheduler.load()
        held = sum(len(scheduler.block_table(e.seq_id)) for e in victims if e.seq_id is not None)
        return (load.free_blocks + held) * load.block_size >= head.sequence.tokens_to_start

    def revoke_unused(self, now: float) -> list[Action]:
        """While others wait: revoke grants for which no piece has arrived in `grant_idle_timeout_s`."""
        actions: list[Action] = []
        for entry in self.entries if self.entries.queued else ():
            ledger = entry.ledger
            if (
                entry.state is ReceiveState.RESERVED
                and ledger
                and now - ledger.last_arrival > self.timers.grant_idle_timeout_s
            ):
                actions += self._revoke(entry, "time", now)
        return actions

    def give_way(self, now: float) -> list[Action]:
        """While nothing here can run because blocks ran out: revoke the worst grant, of whatever class. What decodes
        was here first, and a whole node would wait for a hand-over that may take long."""
        if not self.entries.scheduler.is_starved:
            return []
        granted = [e for e in self.entries if e.state is ReceiveState.RESERVED]
        worst = max(granted, key=lambda e: self._rank(e, now), default=None)
        return [] if worst is None else self._revoke(worst, "growth", now)

    def _revoke(self, entry: Entry, reason: str, now: float) -> list[Action]:
        """Not committed yet, so it is safe to revoke: its prefill node asks the next candidate."""
        return self.entries.revoke(entry, Revoke(key=entry.key, reason=reason), now)

    def drain(self, now: float) -> list[Action]:
        """Grant nothing more, and revoke what is not committed."""
        self.draining = True
        waiting = [e for e in self.entries if e.state in (ReceiveState.QUEUED, ReceiveState.RESERVED)]
        return [action for entry in waiting for action in self._revoke(entry, "draining", now)]
