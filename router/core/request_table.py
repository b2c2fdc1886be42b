"""The requests of a router worker: they are accepted, wait, are placed, fall back to waiting, and end once. Pure.

Only this table changes the state of a request. `node_reports.py` handles the nodes' messages, `heartbeats.py` sends
the wanted sets. Protocol rules 3, 31, 33 to 35.
"""

import heapq
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError, KvferryError, UnavailableError
from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.links import LinkTable
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Cancel
from kvferry.router.api import EndEvent, GenerateRequest, Outcome, Usage
from kvferry.router.core.effects import Effect, FinishRequest
from kvferry.router.core.placer import Placer, RetryBudget
from kvferry.router.core.request import Request, RequestEvent, RequestState

COMPACT_AT = 256
"""Deadlines of ended requests that may stay in the heap, besides twice the number of requests."""


@dataclass(slots=True)
class RequestTable:
    """All requests that have not ended. Methods return effects, to be performed in order."""

    links: LinkTable
    placer: Placer
    timers: Timers
    limits: Limits
    rng: random.Random
    by_id: dict[RequestId, Request] = field(default_factory=dict)
    _waiting: dict[RequestId, None] = field(default_factory=dict)
    _deadlines: list[tuple[float, RequestId]] = field(default_factory=list)
    """A heap; entries of ended requests are removed when they surface or are too many."""

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self.by_id.values()))  # a copy: requests may end meanwhile

    def get(self, request_id: RequestId) -> Request | None:
        """The request; None if it is unknown or has ended."""
        return self.by_id.get(request_id)

    def current(self, request_id: RequestId, attempt: int) -> Request | None:
        """The request, if this is its current attempt: reports of other attempts must change nothing."""
        request = self.by_id.get(request_id)
        if request is None or request.attempt != attempt or request.state is RequestState.WAITING:
            return None
        return request

    def new_requests(self, model: str | None = None) -> Iterator[Request]:
        """Requests for the model (for any) that wait for their first pair of nodes."""
        for request_id in self._waiting:
            request = self.by_id[request_id]
            if request.is_new and model in (None, request.spec.model):
                yield request

    # -- placing

    def accept(self, asked: GenerateRequest, vocab_size: int, now: float) -> list[Effect]:
        """Add an admitted request; its ids were checked against `vocab_size`."""
        request = Request.new(asked, vocab_size, now)
        self.by_id[request.request_id] = request
        heapq.heappush(self._deadlines, (request.deadline, request.request_id))
        self._compact()
        self._waiting[request.request_id] = None
        return self._try_place(request, now)

    def set_decode_node(self, request: Request, event: RequestEvent, decode: Incarnation, now: float) -> None:
        """From now on this decode node owns the attempt."""
        request.machine.move(event, now)
        request.decode = decode
        request.decode_name = self._node_name(decode)

    def _try_place(self, request: Request, now: float, full: Collection[Incarnation] = ()) -> list[Effect]:
        placement = self.placer.place(request, now, full)
        if placement is None:
            return []
        effects = self._release_held_kv(request, placement.prefill)
        request.attempt += 1
        request.token_source = self.placer.token_source(placement.prefill)
        request.base_index = request.next_index
        request.placement, request.decode, request.decode_sent_tokens, request.resend = placement, None, False, False
        request.machine.move(RequestEvent.JOB_SENT, now)
        self._waiting.pop(request.request_id, None)
        request.prefill_name = self._node_name(placement.prefill)
        return [*effects, Send(placement.prefill, self.placer.job(request, placement, now))]

    def _release_held_kv(self, request: Request, next_prefill: Incarnation) -> list[Effect]:
        """The KV held for the next attempt is used by it, or released at a node that it does not go to."""
        holder, request.holder = request.holder, None
        return [] if holder is None or holder == next_prefill else self._cancel(request, [holder], "placed elsewhere")

    def _node_name(self, peer: Incarnation) -> str:
        link = self.links.peer(peer)
        return link.welcome.name if link is not None and link.welcome is not None else ""

    # -- back to waiting

    def setback(
        self, request: Request, event: RequestEvent, now: float, holder: Incarnation | None = None
    ) -> list[Effect]:
        """A refusal or a preemption: costs no attempt, and is spaced by a growing backoff.

        holder: the prefill node that holds the computed KV for the next attempt while its wanted set has this one.
        """
        request.setbacks += 1
        backoff = min(self.timers.backoff_max_s, self.timers.backoff_min_s * 2 ** min(request.setbacks - 1, 10))
        return self._back_to_waiting(request, event, backoff, now, holder)

    def loss(self, request: Request, now: float, *, crashed: bool, why: str) -> list[Effect]:
        """A node lost the attempt: place it again, or end it after too many losses or crashes without progress."""
        request.losses += 1
        request.crashes += crashed
        if request.losses >= self.limits.max_attempts or request.crashes >= self.limits.crash_limit:
            text = f"lost {request.losses} times in a row without a new token; last cause: {why}"
            return self.end(request, "error", KvferryError(text), now, "too many losses")
        return self._back_to_waiting(request, RequestEvent.LOST, self.rng.random() * self.timers.retry_jitter_s, now)

    def _back_to_waiting(
        self, request: Request, event: RequestEvent, delay_s: float, now: float, holder: Incarnation | None = None
    ) -> list[Effect]:
        wanted = [peer for peer, _ in request.wanted_at() if peer != holder]
        effects = self._cancel(request, wanted, "placed again")
        request.machine.move(event, now)
        request.decode, request.holder = None, holder
        request.not_before, request.waiting_since = now + delay_s, now
        self._waiting[request.request_id] = None
        return effects

    # -- the end

    def end(self, request: Request, outcome: Outcome, error: Exception | None, now: float, why: str) -> list[Effect]:
        """End the request, once: later reports no longer find it."""
        wanted = [] if outcome in ("stop", "length") else [peer for peer, _ in request.wanted_at()]
        effects = self._cancel(request, wanted, why)
        request.holder = None
        request.machine.move(RequestEvent.END, now)
        del self.by_id[request.request_id]
        self._waiting.pop(request.request_id, None)
        usage = Usage(len(request.spec.prompt_token_ids), request.next_index, request.cached_tokens)
        end = EndEvent(outcome, usage, request.prefill_name, request.decode_name, error, request.attempt)
        return [*effects, FinishRequest(request.request_id, end)]

    def end_all(self, error: Exception, now: float, why: str) -> list[Effect]:
        """End all requests."""
        effects: list[Effect] = []
        for request in self:
            effects += self.end(request, "error", error, now, why)
        return effects

    def _cancel(self, request: Request, peers: Iterable[Incarnation], why: str) -> list[Effect]:
        # Best effort: the next heartbeats no longer have the request.
        message = Cancel(request_id=request.request_id, attempt=request.attempt, reason=why)
        return [Send(peer, message) for peer in peers if (link := self.links.peer(peer)) is not None and link.up]

    # -- time

    def tick(self, now: float) -> list[Effect]:
        """End requests past their deadline, place waiting ones, end those that waited too long for nodes."""
        effects: list[Effect] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.by_id.get(heapq.heappop(self._deadlines)[1])
            if request is not None:
                effects += self.end(request, "timeout", None, now, "deadline")
        return effects + self._place_due(now) + self._refuse_overdue(now) + self._end_stranded(now)

    def _place_due(self, now: float) -> list[Effect]:
        """Place waiting requests, oldest first. A request that is placed again never overtakes an older one of its
        model that waits for the budget. If no pair of nodes serves a model, no other request for it is tried."""
        due = [request for request_id in self._waiting if (request := self.by_id[request_id]).not_before <= now]
        if not due:
            return []
        effects: list[Effect] = []
        budget = RetryBudget.of(self.by_id.values(), self.limits.retry_tokens_per_node)
        blocked: set[str] = set()
        unserved: set[str] = set()
        for request in sorted(due, key=lambda r: r.accepted_at):
            if request.spec.model in unserved or (request.spec.model in blocked and not request.is_new):
                continue
            full = budget.full_for(request)
            effects += self._try_place(request, now, full)
            if request.state is RequestState.PLACED:
                budget.note(request)
            elif self.placer.not_ready_reason(request.spec.model) is not None:
                unserved.add(request.spec.model)
            elif full and self.placer.unplaceable_reason(request) is None:
                blocked.add(request.spec.model)
        return effects

    def _refuse_overdue(self, now: float) -> list[Effect]:
        """End new requests for which no nodes came in time. Must run after `_place_due`, which places servable ones."""
        effects: list[Effect] = []
        for request in list(self.new_requests()):
            if now - request.accepted_at >= self.timers.new_request_wait_s:
                late = f"no node accepted the request within {self.timers.new_request_wait_s:g} s"
                error = UnavailableError(self.placer.unplaceable_reason(request) or late)
                effects += self.end(request, "error", error, now, "no node")
        return effects

    def _end_stranded(self, now: float) -> list[Effect]:
        """End requests whose model is served, but not by nodes that can continue them, and these did not return."""
        effects: list[Effect] = []
        for request in [self.by_id[request_id] for request_id in self._waiting]:
            if request.is_new or now - request.waiting_since < self.timers.migration_wait_s:
                continue
            reason = self.placer.unplaceable_reason(request)
            if reason is not None and self.placer.not_ready_reason(request.spec.model) is None:
                effects += self.end(request, "error", UnavailableError(reason), now, "stranded")
        return effects

    def _compact(self) -> None:
        if len(self._deadlines) > COMPACT_AT + 2 * len(self.by_id):
            self._deadlines = [due for due in self._deadlines if due[1] in self.by_id]
            heapq.heapify(self._deadlines)

    def check_invariants(self) -> None:
        """Raises InvariantError when the tables disagree."""
        for request_id, request in self.by_id.items():
            request.check_invariants()
            if request.request_id != request_id or request.state is RequestState.ENDED:
                raise InvariantError(f"request {request_id} must not be in the table")
            if (request.state is RequestState.WAITING) != (request_id in self._waiting):
                raise InvariantError(f"request {request_id} is {request.state.name} but the waiting requests disagree")
        if any(request_id not in self.by_id for request_id in self._waiting):
            raise InvariantError("an ended request is still waiting")
        due = {request_id for _, request_id in self._deadlines}
        if any(request_id not in due for request_id in self.by_id):
            raise InvariantError("a request has no deadline")
