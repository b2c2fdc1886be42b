"""What a node core asks of the roles plugged into it, and what passes between two roles of one process. Types only.

The roles live in prefill_node and decode_node, and know one another by these types alone.
"""

from array import array
from dataclasses import dataclass
from typing import Protocol

from kvferry.common.base.ids import (
    Incarnation,
    RequestId,
    TransferKey,
)
from kvferry.common.cluster.actions import Action
from kvferry.common.cluster.clients import Client
from kvferry.common.cluster.events import Event
from kvferry.common.protocol.messages import Message, RoleName
from kvferry.common.scheduling.events import SchedulerEvent
from kvferry.common.scheduling.sequence import SequenceSpec
from kvferry.common.scheduling.step import StepBatch


class NodeRole(Protocol):
    """One role's decisions. Every method returns what is to be done, in order."""

    name: RoleName

    def handles(self, message: Message) -> bool:
        """Whether this message from a client is for this role."""
        ...

    def on_message(self, client: Client, message: Message, now: float) -> list[Action]:
        """A client said something other than Hello or Beat."""
        ...

    def on_heartbeat(self, client: Client, now: float) -> list[Action]:
        """A client's new list: free what is old and absent, answer what is expected."""
        ...

    def on_client_lost(self, client: Client, now: float) -> list[Action]:
        """A client is gone: free all that it had."""
        ...

    def knows(self, request_id: RequestId, attempt: int) -> bool:
        """Whether anything is held or recorded for this attempt."""
        ...

    def on_event(self, event: Event, now: float) -> list[Action]:
        """A link, transport or layer event."""
        ...

    def owns(self, seq_id: int) -> bool:
        """Whether the scheduler's sequence is this role's. It is one role's at a time."""
        ...

    def on_scheduler(self, event: SchedulerEvent, now: float) -> list[Action]:
        """The scheduler says something of a sequence that this role owns."""
        ...

    def may_start(self, spec: SequenceSpec) -> bool:
        """Whether the head of the waiting queue may begin to compute."""
        ...

    def wants_layers(self, plan: StepBatch) -> bool:
        """Whether progress within this step matters."""
        ...

    def tick(self, now: float) -> list[Action]:
        """Time went by."""
        ...

    def flush(self, now: float) -> list[Action]:
        """After each event: what was gathered meanwhile (tokens, transfer slots)."""
        ...

    def drain(self, now: float) -> list[Action]:
        """Take nothing new from now on."""
        ...

    def preempt_all(self, now: float) -> list[Action]:
        """The drain took too long: give back what is left."""
        ...

    def is_quiescent(self) -> bool:
        """Nothing is held and nothing is recorded."""
        ...

    def check_invariants(self) -> None:
        """Raises InvariantError when its tables disagree."""
        ...


@dataclass(frozen=True, slots=True)
class LocalHandover:
    """A request whose first token was just drawn, as the prefill role gives it to the decode role of its own process.

    The sequence decodes already; whoever has this object owns it.
    """

    key: TransferKey
    """Names this process twice, and generation 0: nothing is transferred."""
    worker: Incarnation
    placement_no: int
    spec: SequenceSpec
    deadline: float
    """Local time in seconds, with the grace in it."""
    output_token_ids: "array[int]"
    """Output ids before the first token; typecode 'I'."""
    seq_id: int
    token_id: int
    """The first token."""
    index: int
    """Its output index."""
    cached_tokens: int


class LocalDecode(Protocol):
    """What a prefill role sees of the decode role of its own process."""

    def take(self, computed: LocalHandover, now: float) -> list[Action]:
        """Answer for the request from now on."""
        ...

    def knows(self, request_id: RequestId, attempt: int) -> bool:
        """Whether anything is held or recorded for this attempt."""
        ...
