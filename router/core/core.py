"""A router worker's decisions: accepts, plans, counts attempts, decides the one outcome of each request. Pure.

The life of a request here: `submit` -> WAITING -> a plan and its Job -> PLACED -> first token, hand-over -> HANDED ->
tokens -> ENDED. Losses lead back to WAITING with the tokens held so far; `table.py` has all moves. Nodes only report;
every message names an attempt, and what belongs to another attempt, or to an ended request, is dropped.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from common.config.protocol import Limits, Timers
from common.errors import GenerationError, InvariantError, KvferryError, OverloadedError, UnavailableError
from common.ids import Incarnation, RequestId
from common.model_info import ModelInfo
from common.protocol.messages import (
    Beat,
    BeatEntry,
    Cancel,
    FirstToken,
    Gone,
    HandedOver,
    HandoverFailed,
    Hello,
    HelloRefused,
    Message,
    OtherLife,
    Status,
    Tokens,
    TokensEntry,
    Welcome,
)
from common.state.actions import Send
from common.state.events import Announced, Event, LinkClosed, LinkConnected, ProbeAnswered, Received, Tick
from common.state.links import Link, LinkTable
from router.api import EndEvent, GenerateRequest, Outcome, TokensEvent, Usage
from router.core.effects import Deliver, Effect, Finish
from router.core.planner import Planner
from router.core.request import Request
from router.core.table import RequestEvent, RequestState

Handler = Callable[[Link, Incarnation, Message, float], list[Effect]]


@dataclass(slots=True)
class RouterCore:
    """All requests of one worker. Methods take the time and return what is to be done, in order."""

    name: str
    timers: Timers
    limits: Limits
    rng: random.Random
    links: LinkTable = field(init=False)
    planner: Planner = field(init=False)
    requests: dict[RequestId, Request] = field(default_factory=dict)
    models: dict[str, ModelInfo] = field(default_factory=dict)
    draining_since: float | None = None
    _waiting: dict[RequestId, None] = field(default_factory=dict)
    _deadlines: list[tuple[float, RequestId]] = field(default_factory=list)
    _last_beat: float = -1e9
    _beat_soon: set[Incarnation] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.links = LinkTable(Hello(kind="worker", name=self.name), self.timers)
        self.planner = Planner(self.links, self.timers)

    # -- what clients do

    def submit(self, asked: GenerateRequest, now: float) -> list[Effect]:
        """Accept a request. Raises UnavailableError or OverloadedError, and then nothing was started."""
        self._admit(asked)
        request = Request.new(
            asked.request_id, asked.model, asked.prompt_token_ids, asked.sampling, asked.priority, now, asked.timeout_s
        )
        self.requests[request.request_id] = request
        heapq.heappush(self._deadlines, (request.deadline, request.request_id))
        self._waiting[request.request_id] = None
        return self._try_plan(request, now)

    def cancel(self, request_id: RequestId, reason: str, now: float) -> list[Effect]:
        """The client wants no more; no effect when the request has ended."""
        request = self.requests.get(request_id)
        return [] if request is None else self._end(request, "cancelled", None, now, reason)

    def drain(self, now: float) -> list[Effect]:
        """Take nothing new; what runs may finish within worker_drain_s."""
        if self.draining_since is None:
            self.draining_since = now
        return []

    def close(self, now: float) -> list[Effect]:
        """The worker exits: end what is left, and tell every node that nothing is wanted any more."""
        effects: list[Effect] = []
        for request in list(self.requests.values()):
            effects += self._end(request, "error", UnavailableError("the router is shutting down"), now, "shutdown")
        return effects + self._beats(now, last=True)

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
            effects += self._on_node_lost(peer, now)
        return effects

    def add_static(self, endpoint: str, now: float) -> list[Effect]:
        """A node from the configuration; it is never forgotten."""
        return [*self.links.add(endpoint, now, static=True)]

    # -- admission

    def _admit(self, asked: GenerateRequest) -> None:
        if self.draining_since is not None:
            raise UnavailableError("the router is draining")
        reason = self.planner.serving_reason(asked.model)
        if reason is not None:
            raise UnavailableError(reason)
        waiting = self.planner.least_waiting_tokens(asked.model)
        if waiting and waiting + len(asked.prompt_token_ids) > self.limits.queued_tokens:
            raise OverloadedError(f"{waiting} prompt tokens are waiting already; try again later")

    # -- planning

    def _try_plan(self, request: Request, now: float) -> list[Effect]:
        plan = self.planner.plan(request, now)
        if plan is None:
            request.not_before = now + self.timers.backoff_min_s
            return []
        request.attempt += 1
        request.base_index = request.next_index
        request.plan, request.decode, request.resend = plan, None, False
        request.machine.move(RequestEvent.PLAN, now)
        self._waiting.pop(request.request_id, None)
        request.prefill_name = self._node_name(plan.prefill)
        return [Send(plan.prefill, self.planner.job(request, plan, now))]

    def _back_to_waiting(self, request: Request, event: RequestEvent, delay_s: float, now: float) -> list[Effect]:
        effects = self._cancels(request, "re-planned")
        request.machine.move(event, now)
        request.decode = None
        request.not_before = now + delay_s
        self._waiting[request.request_id] = None
        return effects

    def _setback(self, request: Request, event: RequestEvent, now: float) -> list[Effect]:
        """A refusal or a preemption: costs no attempt, is spaced by a growing backoff."""
        request.setbacks += 1
        backoff = min(self.timers.backoff_max_s, self.timers.backoff_min_s * 2 ** min(request.setbacks - 1, 10))
        return self._back_to_waiting(request, event, backoff, now)

    def _loss(self, request: Request, now: float, *, crashed: bool, why: str) -> list[Effect]:
        """A node lost the attempt: plan again, unless losses without any progress say that it is hopeless."""
        request.losses += 1
        request.crashes += crashed
        if request.losses >= self.limits.max_attempts or request.crashes >= self.limits.crash_limit:
            text = f"lost {request.losses} times in a row without a new token, last: {why}"
            return self._end(request, "error", KvferryError(text), now, "too many losses")
        return self._back_to_waiting(request, RequestEvent.LOST, self.rng.random() * self.timers.replan_jitter_s, now)

    # -- messages

    def _on_message(self, endpoint: str, sender: Incarnation, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Welcome):
            self.models[message.model.name] = message.model
            self._beat_soon.add(sender)  # a decode node takes reservations only for workers that it hears
            return [*self.links.on_welcome(endpoint, sender, message, now)]
        if isinstance(message, HelloRefused):
            self.links.on_hello_refused(endpoint, message, now)
            return []
        hellos = self.links.on_heard(endpoint, sender, now, unknown=isinstance(message, OtherLife))
        link = self.links.peer(sender)
        if link is None or isinstance(message, OtherLife):
            return [*hellos]
        match message:
            case Status():
                return self._on_status(link, sender, message, now)
            case Tokens():
                return self._on_tokens(link, sender, message, now)
            case FirstToken() | HandedOver() | HandoverFailed() | Gone():
                request = self.requests.get(message.request_id)
                if request is None or request.attempt != message.attempt or request.state is RequestState.WAITING:
                    return []
                return self._on_report(request, sender, message, now)
            case _:
                return []  # a node of a later protocol may say more

    def _on_status(self, link: Link, sender: Incarnation, message: Status, now: float) -> list[Effect]:
        self.links.on_status(link, message, now)
        self.planner.on_status(sender)
        if message.link_seq > link.link_seq:
            link.link_seq = message.link_seq
            self._ask_again(sender)
        return []

    def _ask_again(self, sender: Incarnation) -> None:
        for request in self.requests.values():
            if request.decode == sender:
                request.resend = True
        self._beat_soon.add(sender)

    def _on_tokens(self, link: Link, sender: Incarnation, message: Tokens, now: float) -> list[Effect]:
        if message.link_seq > link.link_seq + 1:
            self._ask_again(sender)
        link.link_seq = max(link.link_seq, message.link_seq)
        effects: list[Effect] = []
        for entry in message.entries:
            request = self.requests.get(entry.request_id)
            if request is not None and request.attempt == entry.attempt and request.state is not RequestState.WAITING:
                effects += self._on_tokens_entry(request, sender, entry, now)
        return effects

    def _on_tokens_entry(self, request: Request, sender: Incarnation, entry: TokensEntry, now: float) -> list[Effect]:
        assert request.plan is not None
        if request.decode is None and (request.plan.names(sender) or request.plan.prefill == sender):
            self._own(request, RequestEvent.DECODE_TOKENS, sender, now)
        if request.decode != sender:
            return []
        if entry.error is not None:
            return self._end(request, "error", GenerationError(entry.error), now, "generation failed")
        request.cached_tokens = max(request.cached_tokens, entry.cached_tokens)
        return self._take(request, sender, entry.first_index, entry.token_ids, entry.finish, now)

    def _take(
        self,
        request: Request,
        sender: Incarnation,
        first_index: int,
        token_ids: tuple[int, ...],
        finish: str | None,
        now: float,
    ) -> list[Effect]:
        index = request.next_index
        fresh = request.take(first_index, token_ids)
        if fresh is None:
            request.resend = True
            self._beat_soon.add(sender)
            return []
        request.resend = False
        effects: list[Effect] = []
        if fresh:
            request.setbacks = 0
            if request.made_progress:
                request.losses = request.crashes = 0
            effects.append(Deliver(request.request_id, TokensEvent(index, fresh)))
        if finish is not None and first_index + len(token_ids) == request.next_index:
            outcome: Outcome = "stop" if finish == "stop" else "length"
            effects += self._end(request, outcome, None, now, finish)
        return effects

    def _own(self, request: Request, event: RequestEvent, decode: Incarnation, now: float) -> None:
        request.machine.move(event, now)
        request.decode = decode
        request.decode_name = self._node_name(decode)

    def _on_report(
        self,
        request: Request,
        sender: Incarnation,
        message: FirstToken | HandedOver | HandoverFailed | Gone,
        now: float,
    ) -> list[Effect]:
        assert request.plan is not None
        from_prefill = sender == request.plan.prefill
        match message:
            case FirstToken() if from_prefill:
                request.machine.move(RequestEvent.FIRST_TOKEN, now)
                request.cached_tokens = max(request.cached_tokens, message.cached_tokens)
                return self._take(request, sender, message.index, (message.token_id,), message.finish, now)
            case HandedOver() if from_prefill and request.decode is None:
                self._own(request, RequestEvent.HANDED_OVER, message.decode, now)
                if self.links.peer(message.decode) is None:
                    return self._loss(request, now, crashed=False, why="the decode node is gone")
                return []
            case HandoverFailed() if from_prefill and request.decode is None:
                return self._on_handover_failed(request, message, now)
            case Gone():
                return self._on_gone(request, sender, message, now)
            case _:
                return []

    def _on_handover_failed(self, request: Request, message: HandoverFailed, now: float) -> list[Effect]:
        assert request.plan is not None
        detail = message.detail or message.reason
        if not message.retryable:
            error = GenerationError(detail) if message.reason == "generation" else KvferryError(detail)
            return self._end(request, "error", error, now, message.reason)
        if message.reason == "overloaded" and request.attempt == 1:
            return self._end(request, "error", OverloadedError(detail), now, message.reason)
        if message.commit_sent or message.reason == "lost":
            if message.decode is not None:
                self.planner.penalise(request.plan.prefill, message.decode, now)
            request.losses += 1
            if request.losses >= self.limits.max_attempts:
                return self._end(request, "error", KvferryError(f"hand-over failed: {detail}"), now, "too many losses")
        return self._setback(request, RequestEvent.HANDOVER_FAILED, now)

    def _on_gone(self, request: Request, sender: Incarnation, message: Gone, now: float) -> list[Effect]:
        assert request.plan is not None
        if request.decode is not None:
            if sender != request.decode:
                return []
            if message.reason == "given_back":
                request.times_preempted += 1
                return self._setback(request, RequestEvent.GIVEN_BACK, now)
            return self._loss(request, now, crashed=False, why=message.detail or "the decode node no longer has it")
        if sender != request.plan.prefill:
            return []
        if message.reason == "never_known":
            request.machine.move(RequestEvent.NEVER_KNOWN, now)
            return [Send(sender, self.planner.job(request, request.plan, now))]
        if message.reason == "given_back":
            return self._setback(request, RequestEvent.LOST, now)
        return self._loss(request, now, crashed=False, why=message.detail or "the prefill node no longer has it")

    def _on_node_lost(self, peer: Incarnation, now: float) -> list[Effect]:
        self.planner.forget(peer)
        self._beat_soon.discard(peer)
        effects: list[Effect] = []
        for request in list(self.requests.values()):
            if request.state is RequestState.HANDED and request.decode == peer:
                effects += self._loss(request, now, crashed=True, why="the decode node died")
            elif request.state is RequestState.PLACED and request.plan is not None and request.plan.prefill == peer:
                effects += self._loss(request, now, crashed=False, why="the prefill node died")
        return effects

    # -- time

    def _on_tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = [*self.links.tick(now)]
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.requests.get(heapq.heappop(self._deadlines)[1])
            if request is not None:
                effects += self._end(request, "timeout", None, now, "deadline")
        for request_id in list(self._waiting):
            request = self.requests[request_id]
            if request.not_before <= now:
                effects += self._try_plan(request, now)
        if self.draining_since is not None and now - self.draining_since > self.timers.worker_drain_s:
            for request in list(self.requests.values()):
                effects += self._end(request, "error", UnavailableError("the router is shutting down"), now, "drain")
        if now - self._last_beat >= self.timers.beat_s:
            self._last_beat = now
            effects += self._beats(now)
        elif self._beat_soon:
            effects += self._beats(now, only=self._beat_soon)
        return effects

    def _beats(self, now: float, *, only: set[Incarnation] | None = None, last: bool = False) -> list[Effect]:
        entries: dict[Incarnation, list[BeatEntry]] = {}
        for request in self.requests.values():
            for peer, expected in self._wanted_at(request):
                entry = BeatEntry(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    next_index=request.next_index,
                    expected=expected,
                    resend=expected and request.resend,
                )
                entries.setdefault(peer, []).append(entry)
        effects: list[Effect] = []
        for peer, link in self.links.by_peer.items():
            if link.up and (only is None or peer in only):
                link.beat_no += 1
                wanted = tuple(entries.get(peer, ()))
                beat = Beat(beat_no=link.beat_no, as_of=self.planner.plan_no, entries=wanted, last=last)
                effects.append(Send(peer, beat))
        self._beat_soon.clear()
        return effects

    def _wanted_at(self, request: Request) -> list[tuple[Incarnation, bool]]:
        if request.state is RequestState.HANDED and request.decode is not None:
            return [(request.decode, True)]
        if request.state is RequestState.PLACED and request.plan is not None:
            others = [c.incarnation for c in request.plan.candidates if c.incarnation != request.plan.prefill]
            return [(request.plan.prefill, True), *((peer, False) for peer in others)]
        return []

    # -- the end

    def _end(self, request: Request, outcome: Outcome, error: Exception | None, now: float, why: str) -> list[Effect]:
        effects = [] if outcome in ("stop", "length") else self._cancels(request, why)
        request.machine.move(RequestEvent.END, now)
        del self.requests[request.request_id]
        self._waiting.pop(request.request_id, None)
        usage = Usage(len(request.prompt_token_ids), request.next_index, request.cached_tokens)
        end = EndEvent(outcome, usage, request.prefill_name, request.decode_name, error)
        return [*effects, Finish(request.request_id, end)]

    def _cancels(self, request: Request, why: str) -> list[Effect]:
        """Best effort: the next list says the same."""
        message = Cancel(request_id=request.request_id, attempt=request.attempt, reason=why)
        return [
            Send(peer, message)
            for peer, _ in self._wanted_at(request)
            if (link := self.links.peer(peer)) is not None and link.up
        ]

    def _node_name(self, peer: Incarnation) -> str:
        link = self.links.peer(peer)
        return link.welcome.name if link is not None and link.welcome is not None else ""

    def check_invariants(self) -> None:
        """Raises InvariantError when the tables disagree."""
        self.links.check_invariants()
        for request_id, request in self.requests.items():
            request.check_invariants()
            if request.request_id != request_id or request.state is RequestState.ENDED:
                raise InvariantError(f"request {request_id} should not be in the table")
            if (request.state is RequestState.WAITING) != (request_id in self._waiting):
                raise InvariantError(f"request {request_id} is {request.state.name} but the waiting list disagrees")
        if any(request_id not in self.requests for request_id in self._waiting):
            raise InvariantError("an ended request is still waiting")

    def is_quiescent(self) -> bool:
        """Nothing is in flight."""
        return not self.requests and not self._waiting
