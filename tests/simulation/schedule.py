"""A schedule as plain data: a cluster and a list of timed events. `draw.py` generates it, `run.py` executes it.

Only the delays of the network are random; they depend on the seed. Omitting events gives another valid schedule, which
shrinking relies on. A schedule saved to a file (JSON) and loaded again is equal to the original.
"""

from pathlib import Path

import msgspec

from kvferry.ops.simulate.network import Delays
from kvferry.ops.simulate.node import MODEL_NAME, NodeSpec
from kvferry.ops.simulate.worker import WorkerSpec
from tests.simulation.incompatible import make_incompatible
from tests.support.files import write_whole


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A client sends a request."""

    at: float
    number: int
    worker: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    priority: int
    timeout_s: float
    poisoned: bool = False
    """Its sampling fails."""
    kills: bool = False
    """Decoding it crashes the node."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The client of a request closes its connection."""

    at: float
    number: int


class Crash(msgspec.Struct, frozen=True, tag=True):
    """kill -9, amid a list of actions; a new incarnation starts at the same address `restart_s` later."""

    at: float
    host: str
    after_actions: int
    restart_s: float


class Drain(msgspec.Struct, frozen=True, tag=True):
    """SIGTERM; a new incarnation starts at the same address `restart_s` after the end of the old one."""

    at: float
    host: str
    restart_s: float


class Freeze(msgspec.Struct, frozen=True, tag=True):
    """SIGSTOP, then SIGCONT."""

    at: float
    host: str
    duration_s: float


class Stall(msgspec.Struct, frozen=True, tag=True):
    """A process handles no messages and no ticks for a while; its connections stay up, its engine continues."""

    at: float
    host: str
    duration_s: float


class Wedge(msgspec.Struct, frozen=True, tag=True):
    """The step of the engine never ends; the process restarts when it detects that, or after `restart_s`."""

    at: float
    host: str
    restart_s: float


class Incompatible(msgspec.Struct, frozen=True, tag=True):
    """An incompatible node replaces a node at its address; after `duration_s` the original one replaces it."""

    at: float
    host: str
    field: str
    """The field that differs; see incompatible.py."""
    duration_s: float


class Blip(msgspec.Struct, frozen=True, tag=True):
    """Connections between two hosts break and are made again; messages in flight are lost or overtaken."""

    at: float
    host_a: str
    host_b: str
    kv: bool


class Cut(msgspec.Struct, frozen=True, tag=True):
    """One direction between two hosts is blocked (for KV both directions)."""

    at: float
    from_host: str
    to_host: str
    duration_s: float
    kv: bool


class Slow(msgspec.Struct, frozen=True, tag=True):
    """Messages from and to a host take `extra_s` longer for a while."""

    at: float
    host: str
    extra_s: float
    duration_s: float


Fault = Crash | Drain | Freeze | Stall | Wedge | Incompatible | Blip | Cut | Slow
ScheduledEvent = Ask | Leave | Fault


class Schedule(msgspec.Struct, frozen=True):
    """One schedule: cluster, network and events."""

    seed: int
    profile: str
    workers: tuple[WorkerSpec, ...]
    nodes: tuple[NodeSpec, ...]
    delays: Delays
    static: bool
    damaged_share: float
    late_share: float
    """Share of one-sided writes that are late, until the last event."""
    unconfirmed_share: float
    piece_delay_s: float
    """A piece is in flight for one to three times this long."""
    events: tuple[ScheduledEvent, ...] = ()
    incompatible: dict[str, str] = {}
    """Name of each incompatible node -> the field that differs (incompatible.py). They are also in `nodes`."""

    @property
    def weights(self) -> frozenset[int]:
        """Weights of all nodes that serve the model at any time."""
        nodes = {node.name: node for node in self.nodes if node.model_name == MODEL_NAME}
        swaps = [event for event in self.events if isinstance(event, Incompatible)]
        replacements = [make_incompatible(nodes[swap.host], swap.field) for swap in swaps]
        return frozenset(
            node.weights_number for node in [*nodes.values(), *replacements] if node.model_name == MODEL_NAME
        )

    @property
    def troubled(self) -> bool:
        """Whether it has any fault; requests, disconnecting clients and delays are none."""
        shares = self.damaged_share + self.late_share + self.unconfirmed_share
        return shares > 0 or any(not isinstance(event, Ask | Leave) or _kills(event) for event in self.events)

    def save(self, path: Path) -> None:
        """Write it to a file as JSON."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def load(cls, path: Path) -> "Schedule":
        """Read it from a file. Raises OSError, or msgspec.DecodeError when the file is not a schedule."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def _kills(event: ScheduledEvent) -> bool:
    return isinstance(event, Ask) and event.kills
