"""A node's view of its clients (router workers, prefill nodes) and of the lists they send. Pure.

Protocol rules 12 to 16: the list says all that a client wants here; what is old enough (number <= as_of) and absent is
freed; what comes late, old enough and absent, is refused. No tombstones, no leases, no acknowledgements.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import (
    AttemptKey,
    Incarnation,
    RequestId,
)
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import ClientKind, Heartbeat, WantedRequest

FORGOTTEN_KEPT = 256


@dataclass(slots=True)
class Client:
    """One process life that said Hello."""

    incarnation: Incarnation
    kind: ClientKind
    name: str
    last_heard: float
    last_heartbeat: float = -1e9
    heartbeat_no: int = 0
    as_of: int = 0
    entries: dict[RequestId, WantedRequest] = field(default_factory=dict)
    link_seq: int = 0
    """Number of the last Tokens message sent to it."""
    returned: bool = False
    """It was silent for too long, so that what it had here is gone."""
    lost: frozenset[AttemptKey] = frozenset()
    """What its first list after that expected here: whether it once was here is not known any more."""

    def take(self, beat: Heartbeat, now: float) -> bool:
        """Adopt a list unless it is older than the present one."""
        self.last_heard = now
        if beat.heartbeat_no <= self.heartbeat_no:
            return False
        self.heartbeat_no, self.as_of, self.last_heartbeat = beat.heartbeat_no, beat.as_of, now
        self.entries = {entry.request_id: entry for entry in beat.entries}
        if self.returned:
            self.returned = False
            self.lost = frozenset(AttemptKey(e.request_id, e.attempt) for e in beat.entries if e.expected)
        return True

    def wants(self, number: int, request_id: RequestId, attempt: int, generation: int = 0) -> bool:
        """False when the list is newer than `number` and does not have this attempt (and generation)."""
        if number > self.as_of:
            return True
        entry = self.entries.get(request_id)
        return entry is not None and entry.attempt == attempt and entry.generation == generation


@dataclass(slots=True)
class ClientTable:
    """All clients of a node."""

    timers: Timers
    clients: dict[Incarnation, Client] = field(default_factory=dict)
    _forgotten: dict[Incarnation, None] = field(default_factory=dict)
    """Lives that were silent for too long, the latest ones."""

    def get(self, incarnation: Incarnation) -> Client | None:
        """The client of this life, if it said Hello and was heard lately."""
        return self.clients.get(incarnation)

    def hello(self, incarnation: Incarnation, kind: ClientKind, name: str, now: float) -> Client:
        """Know a client; saying Hello again changes nothing that is held for it."""
        client = self.clients.get(incarnation)
        if client is None:
            client = self.clients[incarnation] = Client(incarnation, kind, name, now)
            client.returned = incarnation in self._forgotten
            self._forgotten.pop(incarnation, None)
        client.last_heard = now
        return client

    def workers(self) -> Iterator[Client]:
        """The router workers among them."""
        return (client for client in self.clients.values() if client.kind == "worker")

    def forgive(self, slept_s: float, now: float) -> None:
        """This process slept for so long: what a client did not say meanwhile does not count."""
        for client in self.clients.values():
            client.last_heard = min(now, client.last_heard + slept_s)
            client.last_heartbeat = min(now, client.last_heartbeat + slept_s)

    def remove(self, incarnation: Incarnation) -> None:
        """The client said its last word."""
        self.clients.pop(incarnation, None)

    def take_silent(self, now: float) -> list[Client]:
        """Remove and return the clients that were silent for too long."""
        silent = [c for c in self.clients.values() if now - c.last_heard > self.timers.client_timeout_s]
        for client in silent:
            del self.clients[client.incarnation]
            self._forgotten[client.incarnation] = None
        while len(self._forgotten) > FORGOTTEN_KEPT:
            del self._forgotten[next(iter(self._forgotten))]
        return silent

    def check_invariants(self) -> None:
        """Raises InvariantError when a client is filed wrongly."""
        for incarnation, client in self.clients.items():
            if client.incarnation != incarnation:
                raise InvariantError(f"client {client.incarnation} is filed under {incarnation}")
