"""A router worker's decisions: accepts, plans, counts attempts, decides the one outcome of each request. Pure.

The life of a request here: `submit` -> WAITING -> a plan and its Job -> PLACED -> first token, hand-over -> HANDED ->
tokens -> ENDED. Losses lead back to WAITING with the tokens held so far; `table.py` has all moves. Nodes only report;
every message names an attempt, and what belongs to another attempt, or to an ended request, is dropped.

Requests and their moves are in `requests.py`, what nodes say in `reports.py`, what they are told in `lists.py`.
"""

import random
from dataclasses import dataclass, field

from kvferry.common.base.errors import (
    InvariantError,
    OverloadedError,
    UnavailableError,
)
from kvferry.common.base.ids import (
    Incarnation,
    RequestId,
)
from kvferry.common.cluster.events import (
    Announced,
    Event,
    LinkClosed,
    LinkConnected,
    ProbeAnswered,
    Received,
    Tick,
)
from kvferry.common.cluster.links import (
    LinkState,
    LinkTable,
)
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import (
    FirstToken,
    Gone,
    HandedOver,
    HandoverFailed,
    Hello,
    HelloRefused,
    Message,
    Status,
    Tokens,
    Welcome,
    WrongIncarnation,
)
from kvferry.common.protocol.model_info import (
    ModelInfo,
    strictest,
)
from kvferry.router.api import GenerateRequest
from kvferry.router.core.effects import Effect
from kvferry.router.core.heartbeats import Heartbeats
from kvferry.router.core.node_reports import NodeReports
from kvferry.router.core.placer import Placer
from kvferry.router.core.request import Request
from kvferry.router.core.request_table import RequestTable


@dataclass(slots=True)
class RouterCore:
    """All of one worker. Methods take the time and return what is to be done, in order."""

    name: str
    timers: Timers
    limits: Limits
    rng: random.Random
    links: LinkTable = field(init=False)
    planner: Placer = field(init=False)
    models: dict[str, ModelInfo] = field(default_factory=dict)
    """All that nodes ever told of, with the least of the limits of those that live."""
    draining_since: float | None = None
    _table: RequestTable = field(init=False)
    _heartbeats: Heartbeats = field(init=False)
    _reports: NodeReports = field(init=False)

    def __post_init__(self) -> None:
        self.links = LinkTable(Hello(kind="worker", name=self.name), self.timers)
        self.planner = Placer(self.links, self.timers)
        self._table = RequestTable(self.links, self.planner, self.timers, self.limits, self.rng)
        self._heartbeats = Heartbeats(self._table, self.links, self.planner, self.timers)
        self._reports = NodeReports(self._table, self._heartbeats, self.links, self.planner, self.limits)

    @property
    def requests(self) -> dict[RequestId, Request]:
        """All that have not ended. Not to be changed by the caller."""
        return self._table.by_id

    # -- what clients do

    def submit(self, asked: GenerateRequest, now: float) -> list[Effect]:
        """Accept a request. Raises UnavailableError or OverloadedError, and then nothing was started.

        If no node can serve it now, it may wait `new_request_wait_s` for one, and then ends with UnavailableError.
        """
        reason = self.not_ready_reason(asked.model)
        if reason is not None and not self._may_wait(asked.model):
            raise UnavailableError(reason)
        self._check_room(asked)
        return self._table.accept(asked, self.models[asked.model].vocab_size, now)

    def _may_wait(self, model: str) -> bool:
        """Whether nodes may come that serve it: some did, and this worker is not about to leave."""
        return self.timers.new_request_wait_s > 0 and self.draining_since is None and model in self.models

    def _check_room(self, asked: GenerateRequest) -> None:
        """Those that wait here count as if they were at the least busy node already."""
        new = list(self._table.new_ones(asked.model))
        if len(new) >= self.limits.queued_requests:
            raise OverloadedError(f"{len(new)} requests are waiting already; try again later")
        waiting = self.planner.least_waiting_tokens(asked.model) + sum(request.num_tokens for request in new)
        if waiting and waiting + len(asked.prompt_token_ids) > self.limits.queued_tokens:
            raise OverloadedError(f"{waiting} prompt tokens are waiting already; try again later")

    def cancel(self, request_id: RequestId, reason: str, now: float) -> list[Effect]:
        """The client wants no more; no effect when the request has ended."""
        request = self._table.get(request_id)
        return [] if request is None else self._table.end(request, "cancelled", None, now, reason)

    def drain(self, now: float) -> list[Effect]:
        """Take nothing new; what runs may finish within worker_drain_s."""
        if self.draining_since is None:
            self.draining_since = now
        return []

    def close(self, now: float) -> list[Effect]:
        """The worker exits: end what is left, and tell every node that nothing is wanted any more."""
        ends = self._table.end_all(UnavailableError("the router is shutting down"), now, "shutdown")
        return ends + self._heartbeats.last()

    def not_ready_reason(self, model: str | None) -> str | None:
        """None when a new request would be served now."""
        if self.draining_since is not None:
            return "the router is draining"
        return self.planner.serving_reason(model)

    # -- what the world does

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event of the shell."""
        effects: list[Effect] = []
        match event:
            case Received(envelope, endpoint):
                effects += self._on_message(endpoint, envelope.sender, envelope.message, now)
            case Tick():
                effects += self._on_tick(now)
            case LinkConnected(endpoint):
                effects += self.links.on_connected(endpoint, now)
            case LinkClosed(endpoint):
                effects += self.links.on_closed(endpoint, now)
            case ProbeAnswered(endpoint, result):
                effects += self.links.on_probe(endpoint, result == "refused", now)
            case Announced(_, announce):
                effects += self.links.add(announce.endpoint, now)
            case _:
                raise InvariantError(f"a router worker does not know the event {type(event).__name__}")
        for peer in self.links.take_lost():
            effects += self._reports.on_node_lost(peer, now)
            self._note_models()
        return effects

    def add_static(self, endpoint: str, now: float) -> list[Effect]:
        """A node from the configuration; it is never forgotten."""
        return [*self.links.add(endpoint, now, static=True)]

    def _on_message(self, endpoint: str, sender: Incarnation, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Welcome):
            self._heartbeats.hurry(sender)  # a decode node takes reservations only for workers that it hears
            effects = self.links.on_welcome(endpoint, sender, message, now)
            self._note_models()
            return [*effects]
        if isinstance(message, HelloRefused):
            self.links.on_hello_refused(endpoint, message, now)
            return []
        hellos = self.links.on_heard(endpoint, sender, now, unknown=isinstance(message, WrongIncarnation))
        link = self.links.peer(sender)
        if link is None or isinstance(message, WrongIncarnation):
            return [*hellos]
        match message:
            case Status():
                self._reports.on_status(link, sender, message, now)
            case Tokens():
                return self._reports.on_tokens(link, sender, message, now)
            case FirstToken() | HandedOver() | HandoverFailed() | Gone():
                return self._reports.on_report(sender, message, now)
            case _:
                pass  # a node of a later protocol may say more
        return []

    def _note_models(self) -> None:
        """A request is checked by what each node that lives would take: whoever gets it can do all of it."""
        living: dict[str, list[ModelInfo]] = {}
        for link in self.links.links.values():
            if link.welcome is not None and link.state in (LinkState.ALIVE, LinkState.SUSPECT):
                living.setdefault(link.welcome.model.name, []).append(link.welcome.model)
        self.models.update({name: strictest(models) for name, models in living.items()})

    def _on_tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = [*self.links.tick(now), *self._table.tick(now)]
        if self.draining_since is not None and now - self.draining_since > self.timers.worker_drain_s:
            effects += self._table.end_all(UnavailableError("the router is shutting down"), now, "drain")
        return effects + self._heartbeats.tick(now)

    def check_invariants(self) -> None:
        """Raises InvariantError when the tables disagree."""
        self.links.check_invariants()
        self._table.check_invariants()

    def is_quiescent(self) -> bool:
        """Nothing is in flight."""
        return not self.requests
