"""The prefill node as a client of decode nodes: its links, and the wanted sets that it sends over them. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import Action, CloseKv, OpenKv, Send
from kvferry.common.cluster.links import Link, LinkInput, LinkState, LinkTable, LinkUpdate
from kvferry.common.protocol.messages import Abort, Candidate, Granted, Heartbeat, Revoke, WantedRequest
from kvferry.prefill_node.handover import Answer, HandoverSender
from kvferry.prefill_node.handover_table import SendState


@dataclass(slots=True)
class DecodeLinks:
    """Links to all decode nodes that jobs named."""

    links: LinkTable
    staging_host: str = ""
    """Prefix of the addresses of staging slots that this node can write; empty: none."""
    _staged: set[Incarnation] = field(default_factory=set)

    def can_stage(self, peer: Incarnation) -> bool:
        """Whether this node can write into the peer's staging slots."""
        return peer in self._staged

    def know(self, candidate: Candidate, now: float) -> list[Action]:
        """Have a link to this candidate."""
        return self.links.add(candidate.endpoint, now)

    def is_up(self, peer: Incarnation) -> bool:
        link = self.links.peer(peer)
        return link is not None and link.up

    def may_live(self, candidate: Candidate) -> bool:
        """False when another incarnation, or none, is known to be at its address."""
        link = self.links.links.get(candidate.endpoint)
        if link is None or link.state is LinkState.CONNECTING:
            return True
        return link.up and link.peer == candidate.incarnation

    def handle(self, event: LinkInput, now: float) -> LinkUpdate:
        """Take in an event. KV sessions open with a Welcome and close with a death."""
        update = self.links.handle(event, now)
        if update.up is not None:
            update.actions += self._open_kv(update.up)
        self._staged.difference_update(update.lost)
        update.actions += [CloseKv(peer) for peer in update.lost]
        return update

    def _open_kv(self, link: Link) -> list[Action]:
        if link.peer is None or link.welcome is None or not link.welcome.kv_endpoints:
            return []
        staging = self._reachable(link.welcome.staging)
        if staging:
            self._staged.add(link.peer)
        return [OpenKv(link.peer, link.welcome.kv_endpoints, staging)]

    def _reachable(self, staging: tuple[str, ...]) -> str:
        places = [place for place in staging if self.staging_host and place.startswith(self.staging_host)]
        return places[0] if places else ""

    def heartbeats(self, senders: Iterable[HandoverSender], transfer_no: int) -> list[Action]:
        """The wanted set of each live decode node."""
        wanted: dict[Incarnation, list[WantedRequest]] = {}
        for sender in senders:
            if sender.key is not None:
                request = WantedRequest(
                    request_id=sender.key.request_id,
                    attempt=sender.key.attempt,
                    next_index=0,
                    expected=sender.state is SendState.COMMITTING,
                    generation=sender.key.generation,
                )
                wanted.setdefault(sender.key.decode, []).append(request)
        actions: list[Action] = []
        for peer, link in self.links.by_peer.items():
            if link.up:
                link.heartbeat_no += 1
                requests = tuple(wanted.get(peer, ()))
                heartbeat = Heartbeat(heartbeat_no=link.heartbeat_no, as_of=transfer_no, wanted=requests)
                actions.append(Send(peer, heartbeat))
        return actions


def release_unwanted(message: Answer) -> list[Action]:
    """Answer a decode node about a hand-over that this node no longer knows: blocks that it reserved are released."""
    if not isinstance(message, Granted | Revoke):
        return []
    return [Send(message.key.decode, Abort(key=message.key))]
