"""One connection of the simulated network, as ZeroMQ over TCP behaves: in order, lossy only where it breaks.

Decides nothing about what breaks when: the network does.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.events import Event
from kvferry.common.protocol.messages import Envelope


class NetworkPeer(Protocol):
    """What the network needs of a process."""

    host: str
    incarnation: Incarnation
    address: str
    alive: bool
    frozen: bool

    def post(self, event: Event) -> None:
        """Deliver an event to the process."""
        ...


@dataclass(slots=True)
class Flight:
    """A message in transit."""

    envelope: Envelope
    epoch: int
    """Which of the connections made one after the other it belongs to."""


@dataclass(slots=True)
class Direction:
    """One way of a connection."""

    last_at: float = 0.0
    """When the last message will arrive: later ones come after it."""
    held: list[Envelope] | None = None
    """While this way is cut: messages that wait for it to heal, or for the connection to break."""
    flying: deque[Flight] = field(default_factory=deque)


@dataclass(slots=True)
class Connection:
    """A client's link to the process that listens at an address."""

    client: NetworkPeer
    address: str
    server: NetworkPeer | None = None
    """None while not connected."""
    epoch: int = 0
    """Counts connections made and broken."""
    closed: bool = False
    """The client closed its socket for good."""
    retry_s: float = 0.0
    outbox: list[Envelope] = field(default_factory=list)
    """Messages that wait for a connection."""
    to_server: Direction = field(default_factory=Direction)
    to_client: Direction = field(default_factory=Direction)

    @property
    def up(self) -> bool:
        """Connected."""
        return self.server is not None
