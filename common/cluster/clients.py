"""A node's view of its clients (router workers, prefill nodes) and of their wanted sets. Pure.

Protocol rules 12 to 16: a wanted set names all that a client wants here. A request that is old enough for the set
(number <= as_of) and not in it is freed; one that arrives late is refused. No tombstones, leases or acknowledgements.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import AttemptKey, Incarnation, RequestId
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import ClientKind, Heartbeat, WantedRequest

FORGOTTEN_KEPT = 256
"""Silent clients that are remembered, so that one that returns is known as such."""


@dataclass(slots=True)
class Client:
    """One incarnation that said Hello."""

    incarnation: Incarnation
    kind: ClientKind
    name: str
    last_heard: float
    last_heartbeat: float = -1e9
    heartbeat_no: int = 0
    as_of: int = 0
    wanted: dict[RequestId, WantedRequest] = field(default_factory=dict)
    """Its wanted set."""
    link_seq: int = 0
    """Number of the last Tokens message sent to it."""
    returned: bool = False
    """It was silent for too long, so that its requests here were freed."""
    lost: frozenset[AttemptKey] = frozenset()
    """Attempts that its first heartbeat after the return expected here. Their state was released with the client, so
    this node cannot know whether it had them."""

    def update_wanted(self, heartbeat: Heartbeat, now: float) -> bool:
        """Adopt the wanted set of a heartbeat. Returns False for a heartbeat that came late."""
        self.last_heard = now
        if heartbeat.heartbeat_no <= self.heartbeat_no:
            return False
        self.heartbeat_no, self.as_of, self.last_heartbeat = heartbeat.heartbeat_no, heartbeat.as_of, now
        self.wanted = {request.request_id: request for request in heartbeat.wanted}
        if self.returned:
            self.returned = False
            self.lost = frozenset(AttemptKey(r.request_id, r.attempt) for r in heartbeat.wanted if r.expected)
        return True

    def wants(self, number: int, request_id: RequestId, attempt: int, generation: int = 0) -> bool:
        """False when the wanted set is newer than `number` and does not name this attempt (and generation)."""
        if number > self.as_of:
            return True
        request = self.wanted.get(request_id)
        return request is not None and request.attempt == attempt and request.generation == generation


@dataclass(slots=True)
class ClientTable:
    """All clients of a node."""

    timers: Timers
    clients: dict[Incarnation, Client] = field(default_factory=dict)
    _forgotten: dict[Incarnation, None] = field(default_factory=dict)
    """Incarnations that were silent for too long, the latest ones."""

    def get(self, incarnation: Incarnation) -> Client | None:
        """The client with this incarnation, if it said Hello and was heard lately."""
        return self.clients.get(incarnation)

    def hello(self, incarnation: Incarnation, kind: ClientKind, name: str, now: float) -> Client:
        """Register a client. Another Hello changes nothing that is held for it."""
        client = self.clients.get(incarnation)
        if client is None:
            client = self.clients[incarnation] = Client(incarnation, kind, name, now)
            client.returned = incarnation in self._forgotten
            self._forgotten.pop(incarnation, None)
        client.last_heard = now
        return client

    def workers(self) -> Iterator[Client]:
        return (client for client in self.clients.values() if client.kind == "worker")

    def forgive(self, slept_s: float, now: float) -> None:
        """This process slept for so long: the clients' silence meanwhile does not count."""
        for client in self.clients.values():
            client.last_heard = min(now, client.last_heard + slept_s)
            client.last_heartbeat = min(now, client.last_heartbeat + slept_s)

    def remove(self, incarnation: Incarnation) -> None:
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
