"""How much of what was planned before one prefill node is asked to compute at a time by this worker. Pure. Rule 35.

Re-plans are never refused by a node's admission. When many requests lose their node at once, those left would get all
of them in one moment: what is beyond the bound waits here, oldest first, and may go to a node that comes meanwhile.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.common.ids import Incarnation
from kvferry.router.core.request import Request
from kvferry.router.core.table import RequestState


@dataclass(slots=True)
class ReplanBudget:
    """Counted anew from the requests whenever plans are due."""

    bound: int
    """Tokens a prefill node may have at a time. One request may always be there, however long it is."""
    in_use: dict[Incarnation, int] = field(default_factory=dict)

    @classmethod
    def of(cls, requests: Iterable[Request], bound: int) -> "ReplanBudget":
        """What is at prefill nodes now."""
        budget = cls(bound)
        for request in requests:
            if request.state is RequestState.PLACED:
                budget.note(request)
        return budget

    def note(self, request: Request) -> None:
        """It is at the prefill node of its plan."""
        if request.plan is not None and request.plan.replan_tokens:
            peer = request.plan.prefill
            self.in_use[peer] = self.in_use.get(peer, 0) + request.plan.replan_tokens

    def full_for(self, request: Request) -> frozenset[Incarnation]:
        """The nodes that have too much to get this one as well; none for a first attempt."""
        if request.is_new:
            return frozenset()
        most = self.bound - request.num_tokens
        return frozenset(peer for peer, tokens in self.in_use.items() if tokens > most and peer != request.holder)
