"""A router worker's decisions: admits, places, counts attempts, decides the one outcome of each request. Pure.

A request here: `submit` -> WAITING -> a placement and its Job -> PLACED -> first token, hand-over -> HANDED_OVER ->
tokens -> ENDED. Losses lead back to WAITING with the tokens known so far; `request.py` has all transitions. Nodes only
report; every message names an attempt, and reports of another attempt or of an ended request are dropped.

`request_table.py` has the requests, `node_reports.py` handles messages of nodes, `heartbeats.py` sends wanted sets.
"""

import random
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError, OverloadedError, UnavailableError
from kvferry.common.base.ids import RequestId
from kvferry.common.cluster.events import Announced, Event, LinkClosed, LinkConnected, ProbeAnswered, Received, Tick
from kvferry.common.cluster.links import Link, LinkInput, LinkState, LinkTable
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import (
    FirstToken,
    Gone,
    HandedOver,
    HandoverFailed,
    Hello,
    Message,
    Status,
    Tokens,
)
from kvferry.common.protocol.model_info import ModelInfo, strictest
from kvferry.router.api import GenerateRequest
from kvferry.router.core.effects import Effect
from kvferry.router.core.heartbeats import Heartbeats
from kvferry.router.core.node_reports import NodeReports
from kvferry.router.core.placer import Placer
from kvferry.router.core.request import Request
from kvferry.router.core.request_table import RequestTable


@dataclass(slots=True)
class RouterCore:
    """The core of one worker. Methods take the time and return effects, to be performed in order."""

    name: str
    timers: Timers
    limits: Limits
    rng: random.Random
    links: LinkTable = field(init=False)
    placer: Placer = field(init=False)
    models: dict[str, ModelInfo] = field(default_factory=dict)
    """All models that nodes have registered, with the strictest limits of the live ones."""
    draining_since: float | None = None
    _table: RequestTable = field(init=False)
    _heartbeats: Heartbeats = field(init=False)
    _node_reports: NodeReports = field(init=False)

    def __post_init__(self) -> None:
        self.links = LinkTable(Hello(kind="worker", name=self.name), self.timers)
        self.placer = Placer(self.links, self.timers)
        self._table = RequestTable(self.links, self.placer, self.timers, self.limits, self.rng)
        self._heartbeats = Heartbeats(self._table, self.links, self.placer, self.timers)
        self._node_reports = NodeReports(self._table, self._heartbeats, self.links, self.placer, self.limits)

    @property
    def requests(self) -> dict[RequestId, Request]:
        """All requests that have not ended; must not be changed by the caller."""
        return self._table.by_id

    # -- calls of clients

    def submit(self, asked: GenerateRequest, now: float) -> list[Effect]:
        """Accept a request. Raises UnavailableError or OverloadedError before anything was started.

        If no nodes can serve it now, it waits `new_request_wait_s` for them and then ends with UnavailableError.
        """
        reason = self.not_ready_reason(asked.spec.model)
        if reason is not None and not self._may_wait(asked.spec.model):
            raise UnavailableError(reason)
        self._check_queue(asked)
        return self._table.accept(asked, self.models[asked.spec.model].vocab_size, now)

    def _may_wait(self, model: str) -> bool:
        """Whether to wait for nodes: some served the model before, and this worker is not draining."""
        return self.timers.new_request_wait_s > 0 and self.draining_since is None and model in self.models

    def _check_queue(self, asked: GenerateRequest) -> None:
        # Requests that wait here count as if they were at the least busy node already.
        new = list(self._table.new_requests(asked.spec.model))
        if len(new) >= self.limits.queued_requests:
            raise OverloadedError(f"{len(new)} requests are already waiting (the limit); try again later")
        waiting = self.placer.least_waiting_tokens(asked.spec.model) + sum(request.num_tokens for request in new)
        if waiting and waiting + len(asked.spec.prompt_token_ids) > self.limits.queued_tokens:
            limit = self.limits.queued_tokens
            raise OverloadedError(f"{waiting} prompt tokens are already waiting (limit {limit}); try again later")

    def cancel(self, request_id: RequestId, reason: str, now: float) -> list[Effect]:
        """Cancel a request for its client; no effect if it has ended."""
        request = self._table.get(request_id)
        return [] if request is None else self._table.end(request, "cancelled", None, now, reason)

    def drain(self, now: float) -> list[Effect]:
        """Accept nothing new; running requests may finish within worker_drain_s."""
        if self.draining_since is None:
            self.draining_since = now
        return []

    def close(self, now: float) -> list[Effect]:
        """The worker exits: end all requests, and send every node an empty wanted set."""
        ends = self._table.end_all(UnavailableError("the router is shutting down"), now, "shutdown")
        return ends + self._heartbeats.send_last()

    def not_ready_reason(self, model: str | None) -> str | None:
        """Why a new request would not be served now; None if it would."""
        if self.draining_since is not None:
            return "the router is draining"
        return self.placer.not_ready_reason(model)

    # -- events

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Process one event of the shell. Raises InvariantError for an event that no worker gets."""
        match event:
            case Announced(_, announce):
                return [*self.links.add(announce.endpoint, now)]
            case Received() | LinkConnected() | LinkClosed() | ProbeAnswered():
                return self._on_link_event(event, now)
            case Tick():
                return self._on_tick(now)
            case _:
                raise InvariantError(f"a router worker does not know the event {type(event).__name__}")

    def _on_link_event(self, event: LinkInput, now: float) -> list[Effect]:
        update = self.links.handle(event, now)
        effects: list[Effect] = [*update.actions]
        if update.up is not None and update.up.peer is not None:
            self._heartbeats.send_soon(
                update.up.peer
            )  # a decode node accepts reservations only for workers it hears from
        if update.link is not None and update.message is not None:
            effects += self._on_message(update.link, update.message, now)
        for peer in update.lost:
            effects += self._node_reports.on_node_lost(peer, now)
        if update.up is not None or update.lost:
            self._note_models()
        return effects

    def add_static(self, endpoint: str, now: float) -> list[Effect]:
        """Add a node from the configuration; its link is never dropped."""
        return [*self.links.add(endpoint, now, static=True)]

    def _on_message(self, link: Link, message: Message, now: float) -> list[Effect]:
        assert link.peer is not None
        match message:
            case Status():
                self._node_reports.on_status(link, link.peer, message, now)
            case Tokens():
                return self._node_reports.on_tokens(link, link.peer, message, now)
            case FirstToken() | HandedOver() | HandoverFailed() | Gone():
                return self._node_reports.on_report(link.peer, message, now)
            case _:
                pass  # a node of a later protocol may send other messages
        return []

    def _note_models(self) -> None:
        # A request must pass the limits of every live node, so that any of them can do all of it.
        live: dict[str, list[ModelInfo]] = {}
        for link in self.links.links.values():
            if link.welcome is not None and link.state in (LinkState.ALIVE, LinkState.SUSPECT):
                live.setdefault(link.welcome.model.name, []).append(link.welcome.model)
        self.models.update({name: strictest(models) for name, models in live.items()})

    def _on_tick(self, now: float) -> list[Effect]:
        effects = [*self._on_link_event(Tick(), now), *self._table.tick(now)]
        if self.draining_since is not None and now - self.draining_since > self.timers.worker_drain_s:
            effects += self._table.end_all(UnavailableError("the router is shutting down"), now, "drain")
        return effects + self._heartbeats.tick(now)

    def check_invariants(self) -> None:
        """Raises InvariantError when the tables disagree."""
        self.links.check_invariants()
        self._table.check_invariants()

    def is_quiescent(self) -> bool:
        """Whether no request is in flight."""
        return not self.requests
