"""Places requests: turns links and loads into a choice of nodes and the Job that names them. Pure.

Keeps what was booked at each node since its last Status, and which pairs of nodes failed recently. `RetryBudget`
bounds the tokens of requests placed again, per prefill node and worker (protocol rule 35).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.links import Link, LinkTable
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Candidate, Job
from kvferry.common.protocol.model_info import Compatibility, TokenSource
from kvferry.router.core.request import Placement, Request, RequestState
from kvferry.router.policy.placement import DecodeView, PrefillView, choose


@dataclass(slots=True)
class RetryBudget:
    """Tokens of requests placed again that each prefill node has, counted from the requests when placements are due.

    A node's admission never refuses a request that is placed again. When many requests lose their node together, the
    remaining nodes would get all of them in one moment. Requests beyond the bound wait in the worker, oldest first,
    and may go to a node that joins meanwhile.
    """

    bound: int
    """Tokens per prefill node. One request may always be there, however long it is."""
    in_use: dict[Incarnation, int] = field(default_factory=dict)

    @classmethod
    def of(cls, requests: Iterable[Request], bound: int) -> "RetryBudget":
        """The budget with all requests counted that are at a prefill node now."""
        budget = cls(bound)
        for request in requests:
            if request.state is RequestState.PLACED:
                budget.note(request)
        return budget

    def note(self, request: Request) -> None:
        """Count a request at the prefill node of its placement."""
        if request.placement is not None and request.placement.retry_tokens:
            peer = request.placement.prefill
            self.in_use[peer] = self.in_use.get(peer, 0) + request.placement.retry_tokens

    def full_for(self, request: Request) -> frozenset[Incarnation]:
        """The nodes without room for this request within the bound; none for a first attempt."""
        if request.is_new:
            return frozenset()
        most = self.bound - request.num_tokens
        return frozenset(peer for peer, tokens in self.in_use.items() if tokens > most and peer != request.holder)


@dataclass(slots=True)
class Placer:
    """Makes placements of requests and the Jobs that carry them."""

    links: LinkTable
    timers: Timers
    placement_no: int = 0
    """Highest number assigned in this incarnation of the worker."""
    _booked_tokens: dict[Incarnation, int] = field(default_factory=dict)
    _booked_blocks: dict[Incarnation, int] = field(default_factory=dict)
    _penalties: dict[tuple[Incarnation, Incarnation], float] = field(default_factory=dict)

    def place(self, request: Request, now: float, full: Collection[Incarnation] = ()) -> Placement | None:
        """Choose nodes for the request and book it there; None if there is no pair of nodes for it.

        full: prefill nodes that must not get it now.
        """
        self._expire(now)
        choice = choose(
            [view for view in self._prefills(request.spec.model, request) if view.incarnation not in full],
            self._decodes(request.spec.model, request),
            avoid=self._penalties.keys(),
            rotation=self.placement_no,
            holder=request.holder,
            held_tokens=request.num_tokens,
        )
        if choice is None:
            return None
        self.placement_no += 1
        self._book(request, choice.prefill, choice.decodes[0])
        candidates = tuple(self._candidate(peer) for peer in choice.decodes)
        computed_again = request.attempt > 0 and choice.prefill != request.holder
        return Placement(self.placement_no, choice.prefill, candidates, request.num_tokens if computed_again else 0)

    def job(self, request: Request, placement: Placement, now: float) -> Job:
        """The Job of this placement; its times are computed at each sending."""
        return Job(
            request_id=request.request_id,
            attempt=request.attempt,
            placement_no=placement.placement_no,
            spec=request.spec_now(),
            remaining_ms=max(0, int((request.deadline - now) * 1000)),
            waited_ms=max(0, int((now - request.accepted_at) * 1000)),
            candidates=placement.candidates,
        )

    def not_ready_reason(self, model: str | None) -> str | None:
        """Why no request of this model (of any) can be placed now; None if one can.

        Names the missing side, or the first difference between the two sides.
        """
        prefills, decodes = self._prefills(model), self._decodes(model)
        if not prefills:
            return "no prefill node is alive"
        if not decodes:
            return "no decode node is alive"
        if not _compatibilities(prefills) & _compatibilities(decodes):
            difference = prefills[0].compatibility.difference(decodes[0].compatibility)
            return f"no prefill node fits a decode node; {difference}"
        return None

    def unplaceable_reason(self, request: Request) -> str | None:
        """Why this request cannot be placed now; None if it can, given room at the nodes."""
        reason = self.not_ready_reason(request.spec.model)
        if reason is not None:
            return reason
        prefills, decodes = self._prefills(request.spec.model, request), self._decodes(request.spec.model, request)
        if _compatibilities(prefills) & _compatibilities(decodes):
            return None
        if request.next_index:
            return f"no live node still serves the weights of {request.spec.model!r} that produced the first tokens"
        return f"no live pair of nodes takes a request of {request.most_tokens} tokens; all have lower limits"

    def token_source(self, peer: Incarnation) -> TokenSource | None:
        """What a node computes tokens with; None for a node without a live link."""
        link = self.links.peer(peer)
        return None if link is None or link.welcome is None else link.welcome.compatibility.token_source

    def least_waiting_tokens(self, model: str) -> int:
        """Waiting prompt tokens of the least busy prefill node that fits a decode node."""
        decodes = _compatibilities(self._decodes(model))
        fitting = (view for view in self._prefills(model) if view.compatibility in decodes)
        return min((view.waiting_tokens for view in fitting), default=0)

    def penalise(self, prefill: Incarnation, decode: Incarnation, now: float) -> None:
        """Avoid a pair that just failed, for pair_penalty_s."""
        self._penalties[prefill, decode] = now + self.timers.pair_penalty_s

    def on_status(self, peer: Incarnation) -> None:
        """A newly published load replaces what was booked on top of the previous one."""
        self._booked_tokens.pop(peer, None)
        self._booked_blocks.pop(peer, None)

    def forget(self, peer: Incarnation) -> None:
        """This incarnation has ended."""
        self.on_status(peer)
        self._penalties = {pair: until for pair, until in self._penalties.items() if peer not in pair}

    def _expire(self, now: float) -> None:
        self._penalties = {pair: until for pair, until in self._penalties.items() if until > now}

    def _usable(self, role: str, model: str | None, request: Request | None) -> list[Link]:
        """Nodes that may get work of this model; with `request`, only nodes that can do all of it."""
        return [
            link
            for link in self.links.links.values()
            if link.usable
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


def _compatibilities(views: Iterable[PrefillView | DecodeView]) -> set[Compatibility]:
    return {view.compatibility for view in views}
