"""The prefill node as a client of decode nodes: links, lists, and which answer goes to which call. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.common.base.ids import (
    Incarnation,
    TransferKey,
)
from kvferry.common.cluster.actions import (
    Action,
    CloseKv,
    OpenKv,
    Send,
)
from kvferry.common.cluster.events import (
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
from kvferry.common.protocol.messages import (
    Abort,
    Candidate,
    CommitRefused,
    Committed,
    Granted,
    Heartbeat,
    HelloRefused,
    Message,
    Queued,
    Refused,
    Revoke,
    Status,
    WantedRequest,
    Welcome,
    WrongIncarnation,
)
from kvferry.prefill_node.handover import HandoverSender
from kvferry.prefill_node.handover_table import SendState

Answer = Granted | Queued | Refused | Committed | CommitRefused | Revoke


@dataclass(slots=True)
class LinkUpdate:
    """What an event on the links meant."""

    actions: list[Action] = field(default_factory=list)
    up: list[Incarnation] = field(default_factory=list)
    lost: list[Incarnation] = field(default_factory=list)
    key: TransferKey | None = None
    message: Answer | None = None


@dataclass(slots=True)
class DecodeLinks:
    """Links to all decode nodes that jobs named."""

    links: LinkTable
    staging_host: str = ""
    """What the address of staging slots begins with that can be written from here; empty: none can."""
    _staged: set[Incarnation] = field(default_factory=set)

    def can_stage(self, peer: Incarnation) -> bool:
        """Whether this life's staging slots can be written from here."""
        return peer in self._staged

    def know(self, candidate: Candidate, now: float) -> list[Action]:
        """Have a link to this candidate."""
        return self.links.add(candidate.endpoint, now)

    def is_up(self, peer: Incarnation) -> bool:
        """Whether this life can be reached."""
        link = self.links.peer(peer)
        return link is not None and link.up

    def may_live(self, candidate: Candidate) -> bool:
        """False when another life, or none, is known to be at its address."""
        link = self.links.links.get(candidate.endpoint)
        if link is None or link.state is LinkState.CONNECTING:
            return True
        return link.up and link.peer == candidate.incarnation

    def on_event(self, event: Event, now: float) -> LinkUpdate:
        """Take an event in. Lives that ended are among the news, each once."""
        update = LinkUpdate()
        match event:
            case Received(envelope, endpoint):
                self._on_message(endpoint, envelope.sender, envelope.message, now, update)
            case LinkConnected(endpoint):
                update.actions += self.links.on_connected(endpoint, now)
            case LinkClosed(endpoint):
                update.actions += self.links.on_closed(endpoint, now)
            case ProbeAnswered(endpoint, result):
                update.actions += self.links.on_probe(endpoint, result == "refused", now)
            case Tick():
                update.actions += self.links.tick(now)
            case _:
                pass
        update.lost = self.links.take_lost()
        self._staged.difference_update(update.lost)
        update.actions += [CloseKv(peer) for peer in update.lost]
        return update

    def _reachable(self, staging: tuple[str, ...]) -> str:
        places = [place for place in staging if self.staging_host and place.startswith(self.staging_host)]
        return places[0] if places else ""

    def _on_message(self, endpoint: str, sender: Incarnation, message: Message, now: float, update: LinkUpdate) -> None:
        if isinstance(message, Welcome):
            update.actions += self.links.on_welcome(endpoint, sender, message, now)
            if self.is_up(sender) and message.kv_endpoints:
                staging = self._reachable(message.staging)
                if staging:
                    self._staged.add(sender)
                update.actions.append(OpenKv(sender, message.kv_endpoints, staging))
                update.up.append(sender)
            return
        if isinstance(message, HelloRefused):
            self.links.on_hello_refused(endpoint, message, now)
            return
        update.actions += self.links.on_heard(endpoint, sender, now, unknown=isinstance(message, WrongIncarnation))
        link = self.links.peer(sender)
        if link is None or isinstance(message, WrongIncarnation):
            return
        if isinstance(message, Status):
            self.links.on_status(link, message, now)
        elif isinstance(message, Answer) and message.key.decode == sender:
            update.key, update.message = message.key, message

    def dispatch(self, sender: HandoverSender, message: Answer, now: float) -> list[Action]:
        """Give a decode node's answer to the hand-over that it concerns."""
        match message:
            case Granted(key=key, first_token=first_token, slots=slots):
                actions = sender.on_granted(key, first_token, now, slots)
                return self.unwanted(message, sender) if actions is None else actions
            case Queued(key=key):
                sender.on_queued(key, now)
                return []
            case Refused(key=key, reason=reason) | CommitRefused(key=key, reason=reason):
                return sender.on_refused(key, reason, now)
            case Revoke(key=key):
                return sender.on_refused(key, "revoked", now) or self.unwanted(message, sender)
            case Committed():
                return sender.on_committed(message, now)

    def unwanted(self, message: Answer, sender: HandoverSender | None = None) -> list[Action]:
        """An answer that nobody waits for: room that was granted is given back."""
        if not isinstance(message, Granted | Revoke):
            return []
        stopped = sender is None or not sender.may_write(message.key)
        return [Send(message.key.decode, Abort(key=message.key, stopped=stopped))]

    def heartbeats(self, senders: Iterable[HandoverSender], transfer_no: int) -> list[Action]:
        """The list of what is wanted, one for each live decode node."""
        entries: dict[Incarnation, list[WantedRequest]] = {}
        for sender in senders:
            if sender.key is not None:
                entry = WantedRequest(
                    request_id=sender.key.request_id,
                    attempt=sender.key.attempt,
                    next_index=0,
                    expected=sender.state is SendState.COMMITTING,
                    generation=sender.key.generation,
                )
                entries.setdefault(sender.key.decode, []).append(entry)
        actions: list[Action] = []
        for peer, link in self.links.by_peer.items():
            if link.up:
                link.heartbeat_no += 1
                wanted = tuple(entries.get(peer, ()))
                actions.append(Send(peer, Heartbeat(heartbeat_no=link.heartbeat_no, as_of=transfer_no, entries=wanted)))
        return actions
