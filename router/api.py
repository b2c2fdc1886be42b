"""The interface between the HTTP layer and the router's service. Plain data and protocols; no IO, no falcon, no zmq.

`router.http` uses it, `router.service` implements it, and tests put another implementation behind the same HTTP layer.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvferry.common.base.ids import RequestId
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.common.protocol.request_spec import RequestSpec

Outcome = Literal["stop", "length", "timeout", "cancelled", "error"]
"""How a request ended; decided once, by the router worker."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request: everything resolved, no defaults left open."""

    request_id: RequestId
    spec: RequestSpec
    timeout_s: float = 600.0
    client_id: str = ""
    """The client's own id, for logs; never a key."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an ended request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """New output tokens; `index` is that of the first. Each index comes once, in order, without gaps."""

    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The one end of a request. `error` is None for stop and length, else the cause if there is one."""

    outcome: Outcome
    usage: Usage
    prefill_node: str = ""
    decode_node: str = ""
    """Names, never addresses, of the nodes that served it last."""
    error: Exception | None = None
    attempts: int = 1
    """Number of placements: more than one if nodes were lost or full; 0 if it never was placed."""


StreamEvent = TokensEvent | EndEvent


class TokenStream(Protocol):
    """The events of one request: any number of TokensEvent, then one EndEvent."""

    request_id: RequestId

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...

    def cancel(self, reason: str) -> None:
        """Stop the request on every node. Idempotent, and allowed at any time."""
        ...


NodeState = Literal["alive", "suspect", "dead", "connecting", "draining", "refused"]


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as this worker sees it."""

    name: str
    roles: tuple[str, ...]
    model: str
    state: NodeState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """Current gauges for /metrics, as this worker knows them; by model name."""

    cache_usage: dict[str, float] = field(default_factory=dict)
    """Used share of the decode nodes' blocks, 0 to 1."""
    prefix_hit_rate: dict[str, float] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    swaps: dict[str, int] = field(default_factory=dict)


class TokenService(Protocol):
    """The service behind the HTTP layer."""

    def model(self, name: str) -> ModelInfo | None:
        """A model that a node has registered at any time, or None (404).

        Raises UnavailableError (503) if no node has registered this configured model yet, or no node any model.
        """
        ...

    def models(self) -> tuple[ModelInfo, ...]:
        """All models that nodes have registered at any time."""
        ...

    def not_ready_reason(self, model: str | None = None) -> str | None:
        """Why a request for the model (for any) would not be served now, in words for a user; None if it would."""
        ...

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Accept a request. Raises OverloadedError (429) or UnavailableError (503) before any work starts.

        The stream may still end with either before its first token, if no node came or none had room.
        """
        ...

    def nodes(self) -> tuple[NodeStatus, ...]:
        """All nodes that this worker knows."""
        ...

    def counts(self) -> ServiceCounts:
        """The current gauges."""
        ...
