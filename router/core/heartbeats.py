"""Heartbeats to the nodes: each carries the wanted set, all requests that the worker wants at that node. Pure.

Protocol rules 12 to 15.
"""

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
    """Sends one to all nodes every `heartbeat_s`, and earlier to nodes that tokens are requested from again."""

    requests: RequestTable
    links: LinkTable
    placer: Placer
    timers: Timers
    _last_sent: float = -1e9
    _due_peers: set[Incarnation] = field(default_factory=set)

    def send_soon(self, peer: Incarnation) -> None:
        """Send the next heartbeat to this node with the next tick."""
        self._due_peers.add(peer)

    def forget(self, peer: Incarnation) -> None:
        """This incarnation has ended."""
        self._due_peers.discard(peer)

    def tick(self, now: float) -> list[Effect]:
        """The heartbeats that are due."""
        if now - self._last_sent >= self.timers.heartbeat_s:
            self._last_sent = now
            return self._send(None)
        return self._send(self._due_peers) if self._due_peers else []

    def send_last(self) -> list[Effect]:
        """To all nodes, with an empty wanted set: the worker exits."""
        return self._send(None, last=True)

    def _send(self, only: set[Incarnation] | None, *, last: bool = False) -> list[Effect]:
        wanted: dict[Incarnation, list[WantedRequest]] = {}
        for request in self.requests:
            for peer, expected in request.wanted_at():
                wanted.setdefault(peer, []).append(_wanted_request(request, expected))
        effects: list[Effect] = []
        for peer, link in self.links.by_peer.items():
            if link.up and (only is None or peer in only):
                link.heartbeat_no += 1
                heartbeat = Heartbeat(
                    heartbeat_no=link.heartbeat_no,
                    as_of=self.placer.placement_no,
                    wanted=tuple(wanted.get(peer, ())),
                    last=last,
                )
                effects.append(Send(peer, heartbeat))
        self._due_peers.clear()
        return effects


def _wanted_request(request: Request, expected: bool) -> WantedRequest:
    return WantedRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        next_index=request.next_index,
        expected=expected,
        resend=expected and request.resend,
    )
