"""What a node core asks of the roles plugged into it, what a role is made of, and what passes between two roles of one
process. Types only: the roles live in prefill_node and decode_node, and know each other by these types alone.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.common.base.ids import AttemptKey, Incarnation, RequestId, TransferKey
from kvferry.common.cluster.actions import Action
from kvferry.common.cluster.clients import Client, ClientTable
from kvferry.common.cluster.events import Event
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.messages import Message, RoleName
from kvferry.common.protocol.model_info import Compatibility
from kvferry.common.scheduling.events import SchedulerEvent
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SequenceSpec
from kvferry.common.scheduling.step import StepBatch


class NodeRole(Protocol):
    """One role's decisions. Methods that return actions return them in the order in which they must be performed."""

    name: RoleName

    def handles(self, message: Message) -> bool:
        """Whether this message of a client is for this role."""
        ...

    def on_message(self, client: Client, message: Message, now: float) -> list[Action]:
        """Any message of a client but Hello and Heartbeat."""
        ...

    def on_heartbeat(self, client: Client, now: float) -> list[Action]:
        """The client's wanted set is new: free what is not in it, reply about what the client expects."""
        ...

    def on_client_lost(self, client: Client, now: float) -> list[Action]:
        """Free everything that the client had here."""
        ...

    def knows(self, request_id: RequestId, attempt: int) -> bool:
        """Whether the role holds or remembers anything of this attempt."""
        ...

    def on_event(self, event: Event, now: float) -> list[Action]:
        """A link, transport or layer event."""
        ...

    def owns(self, seq_id: int) -> bool:
        """Whether the scheduler's sequence belongs to this role. A sequence belongs to one role at a time."""
        ...

    def on_scheduler(self, event: SchedulerEvent, now: float) -> list[Action]:
        """The scheduler reports on a sequence of this role."""
        ...

    def may_start(self, spec: SequenceSpec) -> bool:
        """Whether the head of the waiting queue may begin to compute."""
        ...

    def wants_layers(self, batch: StepBatch) -> bool:
        """Whether the step must report its layers."""
        ...

    def tick(self, now: float) -> list[Action]: ...

    def flush(self, now: float) -> list[Action]:
        """After each event: send what was gathered (tokens, transfer slots)."""
        ...

    def drain(self, now: float) -> list[Action]:
        """Accept nothing new from now on."""
        ...

    def preempt_all(self, now: float) -> list[Action]:
        """The drain took too long: have the rest placed elsewhere."""
        ...

    def is_quiescent(self) -> bool:
        """Nothing is held and nothing is remembered."""
        ...

    def check_invariants(self) -> None:
        """Raises InvariantError when the role's tables disagree."""
        ...


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What the roles of one node are made of, besides their own tables."""

    self_id: Incarnation
    name: str
    compatibility: Compatibility
    scheduler: Scheduler
    timers: Timers
    limits: Limits
    shape: KvShape
    clients: ClientTable
    num_blocks: int
    block_size: int
    num_staging_slots: int = 0
    """Slots of this node that one-sided transports may write into."""
    staging_host: str = ""
    """Prefix of the addresses of other nodes' slots that this node can write; empty: none."""


MakeRoles = Callable[[RoleContext], Sequence[NodeRole]]


@dataclass(frozen=True, slots=True)
class LocalHandover:
    """A request whose first token was just sampled, passed from the prefill role to the decode role of one process.

    The sequence decodes already; the holder of this object owns it.
    """

    key: TransferKey
    """Names this process twice, and generation 0: nothing is transferred."""
    worker: Incarnation
    placement_no: int
    sequence: SequenceSpec
    deadline: float
    """Local time in seconds, including the grace."""
    output_token_ids: "array[int]"
    """Output ids before the first token; typecode 'I'."""
    seq_id: int
    token_id: int
    """The first token."""
    index: int
    """Its output index."""
    cached_tokens: int

    @property
    def attempt_key(self) -> AttemptKey:
        """What the worker knows it by."""
        return AttemptKey(self.key.request_id, self.key.attempt)


class LocalDecode(Protocol):
    """What a prefill role sees of the decode role of its own process."""

    def adopt(self, computed: LocalHandover, now: float) -> list[Action]:
        """Own the request from now on."""
        ...

    def knows(self, request_id: RequestId, attempt: int) -> bool:
        """Whether the role holds or remembers anything of this attempt."""
        ...
