"""What the HTTP layer may ask of the router's service, as types. Plain data and protocols; no IO, no falcon, no zmq.

`router.http` is written against this file; `router.service` implements it; tests may put another implementation
behind the same HTTP layer.
"""

from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvferry.common.base.ids import RequestId
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.common.protocol.sampling_params import SamplingParams

Outcome = Literal["stop", "length", "timeout", "cancelled", "error"]
"""How a request ended; decided once, by the router worker."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request: everything resolved, nothing left to default."""

    request_id: RequestId
    model: str
    prompt_token_ids: "array[int]"
    """typecode 'I'."""
    sampling: SamplingParams
    priority: int = 5
    timeout_s: float = 600.0
    client_id: str = ""
    """The client's own id, for logs and stopInfer; never a key."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an ended request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """New output tokens; `index` is that of the first. Indices come once each, in order, without gaps."""

    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The one end of a request. `error` is None for stop and length; else the exception that says why."""

    outcome: Outcome
    usage: Usage
    prefill_node: str = ""
    decode_node: str = ""
    """Names of the nodes that served it last, never addresses."""
    error: Exception | None = None
    attempts: int = 1
    """Plans that it took: more than one where nodes were lost or full; 0 where none was made."""


StreamEvent = TokensEvent | EndEvent


class TokenStream(Protocol):
    """The events of one request: any number of TokensEvent, then one EndEvent."""

    request_id: RequestId

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...

    def cancel(self, reason: str) -> None:
        """The client is gone or wants no more: stop it on every node. Safe to call at any time, any number of times."""
        ...


NodeState = Literal["alive", "suspect", "dead", "connecting", "draining", "refused"]


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node as this worker sees it."""

    name: str
    roles: tuple[str, ...]
    model: str
    state: NodeState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """Gauges for /metrics, of this instant, of this worker."""

    cache_usage: dict[str, float] = field(default_factory=dict)
    """Model name -> used share of the decode nodes' blocks, 0 to 1."""
    prefix_hit_rate: dict[str, float] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    swaps: dict[str, int] = field(default_factory=dict)


class TokenService(Protocol):
    """What stands behind the HTTP layer."""

    def model(self, name: str) -> ModelInfo | None:
        """A model that a node told of at any time; None: 404. UnavailableError (503): configured, not told of yet, or
        no node told of any model yet."""
        ...

    def models(self) -> tuple[ModelInfo, ...]:
        """All models ever known."""
        ...

    def not_ready_reason(self, model: str | None = None) -> str | None:
        """None when a request for the model (any model) would be served now; else why not, fit for a user."""
        ...

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Take a request on. Raises OverloadedError (429) or UnavailableError (503) before any work starts; the stream
        may still end with these before a first token, when no node came or none had room."""
        ...

    def nodes(self) -> tuple[NodeStatus, ...]:
        """All nodes that this worker knows of."""
        ...

    def counts(self) -> ServiceCounts:
        """Gauges of this instant."""
        ...
