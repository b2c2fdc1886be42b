"""One connection of the simulated network, as ZeroMQ over TCP behaves: in order, lossy only where it breaks.

No decisions about what breaks when; that is the network's.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.common.protocol.messages import Envelope

if TYPE_CHECKING:
    from kvferry.ops.simulate.process import Process


@dataclass(slots=True)
class Flight:
    """A message under way."""

    envelope: Envelope
    life: int
    """Which life of the connection it belongs to."""


@dataclass(slots=True)
class Direction:
    """One way of a connection."""

    last_at: float = 0.0
    """When the last message will arrive: later ones come after it."""
    held: list[Envelope] | None = None
    """While this way is cut: what waits for it to heal, or for the connection to break."""
    flying: deque[Flight] = field(default_factory=deque)


@dataclass(slots=True)
class Connection:
    """A client's link to whoever listens at an address."""

    client: "Process"
    address: str
    server: "Process | None" = None
    """None while not connected."""
    life: int = 0
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
