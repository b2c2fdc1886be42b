"""State of one connection of the simulated network, which behaves as ZeroMQ over TCP: in order, lossy only on a break.

Plain data. `network.py` decides what breaks and when.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.events import Event
from kvferry.common.protocol.messages import Envelope


class Endpoint(Protocol):
    """A process as the network sees it."""

    host: str
    incarnation: Incarnation
    address: str
    alive: bool
    frozen: bool

    def post(self, event: Event) -> None: ...


@dataclass(slots=True)
class Flight:
    """A message in flight."""

    envelope: Envelope


@dataclass(slots=True)
class Direction:
    """One direction of a connection."""

    last_at: float = 0.0
    """Arrival time of the last message; later messages arrive after it."""
    held: list[Envelope] | None = None
    """While this direction is cut: messages that wait until it heals or the connection breaks."""
    in_flight: deque[Flight] = field(default_factory=deque)


@dataclass(slots=True)
class Connection:
    """A client's link to the process that listens at an address."""

    client: Endpoint
    address: str
    server: Endpoint | None = None
    """None while not connected."""
    epoch: int = 0
    """Incremented whenever the connection is made or breaks."""
    closed: bool = False
    """The client closed its socket."""
    retry_s: float = 0.0
    outbox: list[Envelope] = field(default_factory=list)
    """Messages that wait for the connection to be made."""
    to_server: Direction = field(default_factory=Direction)
    to_client: Direction = field(default_factory=Direction)

    @property
    def up(self) -> bool:
        return self.server is not None
