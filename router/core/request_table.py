"""The requests of a router worker: how they come, wait, are planned, fall back, and end once. Pure.

Only what moves a request is here; who says what is in `reports.py`, what nodes are told regularly in `lists.py`.
Protocol rules 3, 31, 33 to 35.
"""

import heapq
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kvferry.common.base.errors import (
    InvariantError,
    KvferryError,
    UnavailableError,
)
from kvferry.common.base.ids import (
    Incarnation,
    RequestId,
)
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.links import LinkTable
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Cancel
from kvferry.router.api import EndEvent, GenerateRequest, Outcome, Usage
from kvferry.router.core.effects import Effect, FinishRequest
from kvferry.router.core.placer import Placer, RetryBudget
from kvferry.router.core.request import (
    Request,
    RequestEvent,
    RequestState,
)

COMPACT_AT = 256


@dataclass(slots=True)
class RequestTable:
    """All requests that have not ended. Methods return what is to be done, in order."""

    links: LinkTable
    planner: Placer
    timers: Timers
    limits: Limits
    rng: random.Random
    by_id: dict[RequestId, Request] = field(default_factory=dict)
    _waiting: dict[RequestId, None] = field(default_factory=dict)
    _deadlines: list[tuple[float, RequestId]] = field(default_factory=list)
    """A heap; those of ended requests go when they surface or are too many."""

    def __iter__(self) -> Iterator[Request]:
        """A copy: requests may end meanwhile."""
        return iter(list(self.by_id.values()))

    def get(self, request_id: RequestId) -> Request | None:
        """None: it never was here, or has ended."""
        return self.by_id.get(request_id)

    def current(self, request_id: RequestId, attempt: int) -> Request | None:
        """The request, if this is the attempt under way: whatever concerns another one changes nothing."""
        request = self.by_id.get(request_id)
        if request is None or request.attempt != attempt or request.state is RequestState.WAITING:
            return None
        return request

    def new_ones(self, model: str | None = None) -> Iterator[Request]:
        """Those of the model (of any) that wait for a first pair of nodes."""
        for request_id in self._waiting:
            request = self.by_id[request_id]
            if request.is_new and model in (None, request.model):
                yield request

    # -- forward

    def accept(self, asked: GenerateRequest, vocab_size: int, now: float) -> list[Effect]:
        """A request that was admitted; `vocab_size`: of the model that its ids were checked by."""
        request = Request.new(
            asked.request_id, asked.model, asked.prompt_token_ids, asked.sampling, asked.priority, now, asked.timeout_s,
            vocab_size,
        )  # fmt: skip
        self.by_id[request.request_id] = request
        heapq.heappush(self._deadlines, (request.deadline, request.request_id))
        self._compact()
        self._waiting[request.request_id] = None
        return self._try_plan(request, now)

    def own(self, request: Request, event: RequestEvent, decode: Incarnation, now: float) -> None:
        """A decode node answers for the attempt from now on."""
        request.machine.move(event, now)
        request.decode = decode
        request.decode_name = self._node_name(decode)

    def _try_plan(self, request: Request, now: float, full: Collection[Incarnation] = ()) -> list[Effect]:
        plan = self.planner.plan(request, now, full)
        if plan is None:
            return []
        effects = self._let_go(request, plan.prefill)
        request.attempt += 1
        request.source = self.planner.source_of(plan.prefill)
        request.base_index = request.next_index
        request.plan, request.decode, request.decode_spoke, request.resend = plan, None, False, False
        request.machine.move(RequestEvent.PLAN, now)
        self._waiting.pop(request.request_id, None)
        request.prefill_name = self._node_name(plan.prefill)
        return [*effects, Send(plan.prefill, self.planner.job(request, plan, now))]

    def _let_go(self, request: Request, next_prefill: Incarnation) -> list[Effect]:
        """What was held for the next attempt is taken over by it, or nobody's any more."""
        holder, request.holder = request.holder, None
        return [] if holder is None or holder == next_prefill else self._cancel(request, [holder], "planned elsewhere")

    def _node_name(self, peer: Incarnation) -> str:
        link = self.links.peer(peer)
        return link.welcome.name if link is not None and link.welcome is not None else ""

    # -- back

    def setback(
        self, request: Request, event: RequestEvent, now: float, holder: Incarnation | None = None
    ) -> list[Effect]:
        """A refusal or a preemption: costs no attempt, is spaced by a growing backoff.

        holder: the prefill node that keeps the computed KV for the next attempt while the list has this one.
        """
        request.setbacks += 1
        backoff = min(self.timers.backoff_max_s, self.timers.backoff_min_s * 2 ** min(request.setbacks - 1, 10))
        return self._back_to_waiting(request, event, backoff, now, holder)

    def loss(self, request: Request, now: float, *, crashed: bool, why: str) -> list[Effect]:
        """A node lost the attempt: plan again, unless losses without any progress say that it is hopeless."""
        request.losses += 1
        request.crashes += crashed
        if request.losses >= self.limits.max_attempts or request.crashes >= self.limits.crash_limit:
            text = f"lost {request.losses} times in a row without a new token, last: {why}"
            return self.end(request, "error", KvferryError(text), now, "too many losses")
        return self._back_to_waiting(request, RequestEvent.LOST, self.rng.random() * self.timers.retry_jitter_s, now)

    def _back_to_waiting(
        self, request: Request, event: RequestEvent, delay_s: float, now: float, holder: Incarnation | None = None
    ) -> list[Effect]:
        wanted = [peer for peer, _ in request.wanted_at() if peer != holder]
        effects = self._cancel(request, wanted, "re-planned")
        request.machine.move(event, now)
        request.decode, request.holder = None, holder
        request.not_before, request.waiting_since = now + delay_s, now
        self._waiting[request.request_id] = None
        return effects

    # -- the end

    def end(self, request: Request, outcome: Outcome, error: Exception | None, now: float, why: str) -> list[Effect]:
        """The one end of a request; whatever comes later finds it no more."""
        wanted = [] if outcome in ("stop", "length") else [peer for peer, _ in request.wanted_at()]
        effects = self._cancel(request, wanted, why)
        request.holder = None
        request.machine.move(RequestEvent.END, now)
        del self.by_id[request.request_id]
        self._waiting.pop(request.request_id, None)
        usage = Usage(len(request.prompt_token_ids), request.next_index, request.cached_tokens)
        end = EndEvent(outcome, usage, request.prefill_name, request.decode_name, error, request.attempt)
        return [*effects, FinishRequest(request.request_id, end)]

    def end_all(self, error: Exception, now: float, why: str) -> list[Effect]:
        """End whatever is left."""
        effects: list[Effect] = []
        for request in self:
            effects += self.end(request, "error", error, now, why)
        return effects

    def _cancel(self, request: Request, peers: Iterable[Incarnation], why: str) -> list[Effect]:
        """Best effort: the next list says the same."""
        message = Cancel(request_id=request.request_id, attempt=request.attempt, reason=why)
        return [Send(peer, message) for peer in peers if (link := self.links.peer(peer)) is not None and link.up]

    # -- time

    def tick(self, now: float) -> list[Effect]:
        """Deadlines that passed, plans that are due, new requests that waited long enough."""
        effects: list[Effect] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.by_id.get(heapq.heappop(self._deadlines)[1])
            if request is not None:
                effects += self.end(request, "timeout", None, now, "deadline")
        return effects + self._plan_due(now) + self._refuse_overdue(now) + self._end_stranded(now)

    def _plan_due(self, now: float) -> list[Effect]:
        """The oldest first. No re-plan overtakes an older one of its model that waits for the budget; where one finds
        no pair of nodes at all, no other one of its model is tried."""
        due = [request for request_id in self._waiting if (request := self.by_id[request_id]).not_before <= now]
        if not due:
            return []
        effects: list[Effect] = []
        budget = RetryBudget.of(self.by_id.values(), self.limits.retry_tokens_per_node)
        held_up: set[str] = set()
        unserved: set[str] = set()
        for request in sorted(due, key=lambda r: r.accepted_at):
            if request.model in unserved or (request.model in held_up and not request.is_new):
                continue
            full = budget.full_for(request)
            effects += self._try_plan(request, now, full)
            if request.state is RequestState.PLACED:
                budget.note(request)
            elif self.planner.serving_reason(request.model) is not None:
                unserved.add(request.model)
            elif full and self.planner.reason_for(request) is None:
                held_up.add(request.model)
        return effects

    def _refuse_overdue(self, now: float) -> list[Effect]:
        """No nodes came in time. Asked after plans were tried: who could be served now is not here any more."""
        effects: list[Effect] = []
        for request in list(self.new_ones()):
            if now - request.accepted_at >= self.timers.new_request_wait_s:
                error = UnavailableError(self.planner.reason_for(request) or "no node took it in time")
                effects += self.end(request, "error", error, now, "no node")
        return effects

    def _end_stranded(self, now: float) -> list[Effect]:
        """Its name is served, but not by nodes that can go on with what was begun, and those did not come back."""
        effects: list[Effect] = []
        for request in [self.by_id[request_id] for request_id in self._waiting]:
            if request.is_new or now - request.waiting_since < self.timers.migration_wait_s:
                continue
            reason = self.planner.reason_for(request)
            if reason is not None and self.planner.serving_reason(request.model) is None:
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
                raise InvariantError(f"request {request_id} should not be in the table")
            if (request.state is RequestState.WAITING) != (request_id in self._waiting):
                raise InvariantError(f"request {request_id} is {request.state.name} but the waiting list disagrees")
        if any(request_id not in self.by_id for request_id in self._waiting):
            raise InvariantError("an ended request is still waiting")
        due = {request_id for _, request_id in self._deadlines}
        if any(request_id not in due for request_id in self.by_id):
            raise InvariantError("a request has no deadline")
