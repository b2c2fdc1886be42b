"""A schedule as plain data: a cluster and a list of timed events. Drawn by `draw.py`, carried out by `run.py`.

Nothing random is left in it but the network's delays, which come from the seed. Leaving events out gives another valid
schedule: that is what shrinking does. A schedule can be kept in a file (JSON) and is the same when it is read again.
"""

from pathlib import Path

import msgspec

from kvferry.ops.simulate.network import Delays
from kvferry.ops.simulate.node import MODEL_NAME, NodeSpec
from kvferry.ops.simulate.worker import WorkerSpec
from tests.simulation.incompatible import mismatched
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
    """No token can be sampled for it."""
    kills: bool = False
    """The node that decodes it dies."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The client of a request closes its connection."""

    at: float
    number: int


class Crash(msgspec.Struct, frozen=True, tag=True):
    """kill -9, in the middle of a list of actions; a new life starts at the same address `restart_s` later."""

    at: float
    host: str
    after_actions: int
    restart_s: float


class Drain(msgspec.Struct, frozen=True, tag=True):
    """SIGTERM; a new life starts at the same address `restart_s` after the end of the old one."""

    at: float
    host: str
    restart_s: float


class Freeze(msgspec.Struct, frozen=True, tag=True):
    """SIGSTOP, then SIGCONT."""

    at: float
    host: str
    duration_s: float


class Stall(msgspec.Struct, frozen=True, tag=True):
    """A process reads no message and feels no time for a while; its connections stand, its engine continues."""

    at: float
    host: str
    duration_s: float


class Wedge(msgspec.Struct, frozen=True, tag=True):
    """The engine's step never ends; the process is restarted when it gives up on it, or after `restart_s`."""

    at: float
    host: str
    restart_s: float


class Mismatch(msgspec.Struct, frozen=True, tag=True):
    """A node is replaced at its address by one that fits no other node, and that one by the right one again."""

    at: float
    host: str
    field: str
    """What is different; see incompatible.py."""
    duration_s: float


class Blip(msgspec.Struct, frozen=True, tag=True):
    """Connections between two hosts break and are made again: some of what was under way is lost or overtaken."""

    at: float
    host_a: str
    host_b: str
    kv: bool


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Nothing passes from one host to another (both ways for KV)."""

    at: float
    from_host: str
    to_host: str
    duration_s: float
    kv: bool


class Slow(msgspec.Struct, frozen=True, tag=True):
    """Everything from and to a host takes that much longer for a while."""

    at: float
    host: str
    extra_s: float
    duration_s: float


ScheduledEvent = Ask | Leave | Crash | Drain | Freeze | Stall | Wedge | Mismatch | Blip | Cut | Slow


class Schedule(msgspec.Struct, frozen=True):
    """All of one schedule."""

    seed: int
    profile: str
    workers: tuple[WorkerSpec, ...]
    nodes: tuple[NodeSpec, ...]
    delays: Delays
    static: bool
    damaged_share: float
    late_share: float
    """Of one-sided writes, until the last event."""
    unconfirmed_share: float
    piece_delay_s: float
    """A piece is under way for once to three times as long."""
    events: tuple[ScheduledEvent, ...] = ()
    incompatible: dict[str, str] = {}
    """Nodes that fit no other one, and what is different about them (incompatible.py). They are among the nodes."""

    @property
    def weights(self) -> frozenset[int]:
        """Of all nodes that ever serve the model."""
        nodes = {node.name: node for node in self.nodes if node.model_name == MODEL_NAME}
        mismatches = [
            mismatched(nodes[event.host], event.field) for event in self.events if isinstance(event, Mismatch)
        ]
        return frozenset(
            node.weights_number for node in [*nodes.values(), *mismatches] if node.model_name == MODEL_NAME
        )

    @property
    def troubled(self) -> bool:
        """Whether anything but asking, leaving and delay happens."""
        shares = self.damaged_share + self.late_share + self.unconfirmed_share
        return shares > 0 or any(not isinstance(event, Ask | Leave) or _kills(event) for event in self.events)

    def save(self, path: Path) -> None:
        """Write it to a file."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def load(cls, path: Path) -> "Schedule":
        """Read it from a file. Raises OSError, or msgspec.DecodeError when it is no schedule."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def _kills(event: ScheduledEvent) -> bool:
    return isinstance(event, Ask) and event.kills
