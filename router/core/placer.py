"""How much of what was planned before one prefill node is asked to compute at a time by this worker. Pure. Rule 35.

Re-plans are never refused by a node's admission. When many requests lose their node at once, those left would get all
of them in one moment: what is beyond the bound waits here, oldest first, and may go to a node that comes meanwhile.

Turns links and loads into plans, and remembers what was booked and which pairs failed. Pure.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.links import (
    Link,
    LinkState,
    LinkTable,
)
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Candidate, Job
from kvferry.common.protocol.model_info import (
    Compatibility,
    TokenSource,
)
from kvferry.router.core.request import Placement, Request, RequestState
from kvferry.router.policy.placement import DecodeView, PrefillView, choose


@dataclass(slots=True)
class RetryBudget:
    """Counted anew from the requests whenever plans are due."""

    bound: int
    """Tokens a prefill node may have at a time. One request may always be there, however long it is."""
    in_use: dict[Incarnation, int] = field(default_factory=dict)

    @classmethod
    def of(cls, requests: Iterable[Request], bound: int) -> "RetryBudget":
        """What is at prefill nodes now."""
        budget = cls(bound)
        for request in requests:
            if request.state is RequestState.PLACED:
                budget.note(request)
        return budget

    def note(self, request: Request) -> None:
        """It is at the prefill node of its plan."""
        if request.plan is not None and request.plan.retry_tokens:
            peer = request.plan.prefill
            self.in_use[peer] = self.in_use.get(peer, 0) + request.plan.retry_tokens

    def full_for(self, request: Request) -> frozenset[Incarnation]:
        """The nodes that have too much to get this one as well; none for a first attempt."""
        if request.is_new:
            return frozenset()
        most = self.bound - request.num_tokens
        return frozenset(peer for peer, tokens in self.in_use.items() if tokens > most and peer != request.holder)


@dataclass(slots=True)
class Placer:
    """Makes plans for requests and the Jobs that carry them."""

    links: LinkTable
    timers: Timers
    placement_no: int = 0
    """Highest number given out in this worker's life."""
    _booked_tokens: dict[Incarnation, int] = field(default_factory=dict)
    _booked_blocks: dict[Incarnation, int] = field(default_factory=dict)
    _penalties: dict[tuple[Incarnation, Incarnation], float] = field(default_factory=dict)

    def plan(self, request: Request, now: float, full: Collection[Incarnation] = ()) -> Placement | None:
        """A new plan for the request, booked; None when no pair of nodes can be named.

        full: prefill nodes that shall not get it now.
        """
        self._expire(now)
        choice = choose(
            [view for view in self._prefills(request.model, request) if view.incarnation not in full],
            self._decodes(request.model, request),
            avoid=self._penalties.keys(),
            turn=self.placement_no,
            holder=request.holder,
            held_tokens=request.num_tokens,
        )
        if choice is None:
            return None
        self.placement_no += 1
        self._book(request, choice.prefill, choice.decodes[0])
        candidates = tuple(self._candidate(peer) for peer in choice.decodes)
        again = request.attempt > 0 and choice.prefill != request.holder
        return Placement(self.placement_no, choice.prefill, candidates, request.num_tokens if again else 0)

    def job(self, request: Request, plan: Placement, now: float) -> Job:
        """The Job of this plan; times are computed anew at each sending."""
        return Job(
            request_id=request.request_id,
            attempt=request.attempt,
            placement_no=plan.placement_no,
            spec=request.spec_now(),
            remaining_ms=max(0, int((request.deadline - now) * 1000)),
            waited_ms=max(0, int((now - request.accepted_at) * 1000)),
            candidates=plan.candidates,
        )

    def serving_reason(self, model: str | None) -> str | None:
        """None when a plan could be made now; else which side is missing, or in what the two sides differ."""
        prefills, decodes = self._prefills(model), self._decodes(model)
        if not prefills:
            return "no prefill node is alive"
        if not decodes:
            return "no decode node is alive"
        if not _kinds(prefills) & _kinds(decodes):
            difference = prefills[0].compatibility.difference(decodes[0].compatibility)
            return f"no prefill node fits a decode node; {difference}"
        return None

    def reason_for(self, request: Request) -> str | None:
        """None when a plan for this request could be made now, if the nodes had room; else why none can."""
        reason = self.serving_reason(request.model)
        if reason is not None:
            return reason
        if _kinds(self._prefills(request.model, request)) & _kinds(self._decodes(request.model, request)):
            return None
        if request.next_index:
            return f"no nodes have the weights of {request.model!r} that the first tokens were drawn with any more"
        return f"the nodes that are there are made for shorter requests than {request.most_tokens} tokens"

    def source_of(self, peer: Incarnation) -> TokenSource | None:
        """What a node computes with; None for one that is not there."""
        link = self.links.peer(peer)
        return None if link is None or link.welcome is None else link.welcome.compatibility.token_source

    def least_waiting_tokens(self, model: str) -> int:
        """Waiting prompt tokens of the least busy prefill node that fits a decode node."""
        kinds = _kinds(self._decodes(model))
        fitting = (view for view in self._prefills(model) if view.compatibility in kinds)
        return min((view.waiting_tokens for view in fitting), default=0)

    def penalise(self, prefill: Incarnation, decode: Incarnation, now: float) -> None:
        """Avoid a pair that just failed."""
        self._penalties[prefill, decode] = now + self.timers.pair_penalty_s

    def on_status(self, peer: Incarnation) -> None:
        """A fresh published load replaces what was booked on top of the old one."""
        self._booked_tokens.pop(peer, None)
        self._booked_blocks.pop(peer, None)

    def forget(self, peer: Incarnation) -> None:
        """A life has ended."""
        self.on_status(peer)
        self._penalties = {pair: until for pair, until in self._penalties.items() if peer not in pair}

    def _expire(self, now: float) -> None:
        self._penalties = {pair: until for pair, until in self._penalties.items() if until > now}

    def _usable(self, role: str, model: str | None, request: Request | None) -> list[Link]:
        """Nodes that may get work of this model; with `request`: those that can do all of it."""
        return [
            link
            for link in self.links.links.values()
            if link.usable
            and link.state is LinkState.ALIVE
            and link.welcome is not None
            and role in link.welcome.roles
            and (model is None or link.welcome.model.name == model)
            and (request is None or request.fits(link.welcome.model, link.welcome.compatibility.token_source))
        ]

    def _prefills(self, model: str | None, request: Request | None = None) -> list[PrefillView]:
        views = []
        for link in self._usable("prefill", model, request):
            assert link.peer is not None
            assert link.welcome is not None
            published = link.status.load.waiting_tokens if link.status else 0
            waiting = published + self._booked_tokens.get(link.peer, 0)
            views.append(PrefillView(link.peer, link.welcome.name, waiting, link.welcome.compatibility))
        return views

    def _decodes(self, model: str | None, request: Request | None = None) -> list[DecodeView]:
        views = []
        for link in self._usable("decode", model, request):
            assert link.peer is not None
            assert link.welcome is not None
            load = link.status.load if link.status else None
            free = (load.free_blocks if load else 0) - self._booked_blocks.get(link.peer, 0)
            total = load.total_blocks if load else 0
            views.append(DecodeView(link.peer, link.welcome.name, free, total, link.welcome.compatibility))
        return views

    def _candidate(self, peer: Incarnation) -> Candidate:
        link = self.links.by_peer[peer]
        assert link.welcome is not None
        return Candidate(incarnation=peer, name=link.welcome.name, endpoint=link.endpoint)

    def _book(self, request: Request, prefill: Incarnation, decode: Incarnation) -> None:
        tokens = request.num_tokens
        self._booked_tokens[prefill] = self._booked_tokens.get(prefill, 0) + tokens
        status = self.links.by_peer[decode].status
        block_size = max(1, status.load.block_size) if status else 1
        blocks = -(-tokens // block_size)
        self._booked_blocks[decode] = self._booked_blocks.get(decode, 0) + blocks


def _kinds(views: Iterable[PrefillView | DecodeView]) -> set[Compatibility]:
    """KV passes between nodes of one kind."""
    return {view.compatibility for view in views}
