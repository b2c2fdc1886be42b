"""What a worker tells each node regularly: the list of all that it wants there. Pure. Protocol rules 12 to 15."""

from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.links import LinkTable
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Heartbeat, WantedRequest
from kvferry.router.core.effects import Effect
from kvferry.router.core.placer import Placer
from kvferry.router.core.request import Request
from kvferry.router.core.request_table import RequestTable


@dataclass(slots=True)
class Heartbeats:
    """Every `heartbeat_s` to all nodes, and at once to those that something is asked of."""

    requests: RequestTable
    links: LinkTable
    planner: Placer
    timers: Timers
    _last_heartbeat: float = -1e9
    _soon: set[Incarnation] = field(default_factory=set)

    def hurry(self, peer: Incarnation) -> None:
        """This node gets its list with the next tick."""
        self._soon.add(peer)

    def forget(self, peer: Incarnation) -> None:
        """That life has ended."""
        self._soon.discard(peer)

    def tick(self, now: float) -> list[Effect]:
        """Lists that are due."""
        if now - self._last_heartbeat >= self.timers.heartbeat_s:
            self._last_heartbeat = now
            return self._heartbeats(None)
        return self._heartbeats(self._soon) if self._soon else []

    def last(self) -> list[Effect]:
        """Nothing is wanted any more, nor will be."""
        return self._heartbeats(None, last=True)

    def _heartbeats(self, only: set[Incarnation] | None, *, last: bool = False) -> list[Effect]:
        entries: dict[Incarnation, list[WantedRequest]] = {}
        for request in self.requests:
            for peer, expected in request.wanted_at():
                entries.setdefault(peer, []).append(_line(request, expected))
        effects: list[Effect] = []
        for peer, link in self.links.by_peer.items():
            if link.up and (only is None or peer in only):
                link.heartbeat_no += 1
                wanted = tuple(entries.get(peer, ()))
                beat = Heartbeat(
                    heartbeat_no=link.heartbeat_no, as_of=self.planner.placement_no, wanted=wanted, last=last
                )
                effects.append(Send(peer, beat))
        self._soon.clear()
        return effects


def _line(request: Request, expected: bool) -> WantedRequest:
    return WantedRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        next_index=request.next_index,
        expected=expected,
        resend=expected and request.resend,
    )
