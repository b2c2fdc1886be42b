"""The client's side of its links: which nodes exist, and which of them are alive. Pure.

Router workers own one table, and prefill nodes one towards decode nodes. Protocol rules 6, 9, 10: a peer is alive on
the link where it is needed; a closed connection makes it suspect; a refused connection or another incarnation means
dead immediately; silence counts only while this process itself runs; a peer whose engine has work and makes no progress
counts as dead too.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import Action, BindPeer, CloseLink, OpenLink, Probe, ResetLink, SendHello
from kvferry.common.cluster.events import LinkClosed, LinkConnected, ProbeAnswered, Received, Tick
from kvferry.common.cluster.sleep_detector import SleepDetector
from kvferry.common.cluster.table import Machine, Table
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Hello, HelloRefused, Message, Status, Welcome, WrongIncarnation

FORGET_AFTER_S = 60.0
"""A dead link whose node is no longer announced is dropped after this long."""
MOST_LINKS = 1024
"""Bound on links to endpoints that others name: each costs descriptors, and any sender may name any endpoint."""
LATE_S = 2.0
"""A message of an earlier incarnation this soon after its successor was welcomed is late, and changes nothing. Not for
ever: two may be welcomed in the wrong order, and the one that runs sends again."""
HELLO_SPACING_S = 0.1
"""Between two Hellos to a node that does not know this client: each message makes it answer so."""


class LinkState(Enum):
    """What may be done over a link."""

    CONNECTING = auto()
    """No Welcome yet."""
    ALIVE = auto()
    """Welcomed, and heard lately: may get new work."""
    SUSPECT = auto()
    """Silent for a while, or its connection broke: keeps its requests, gets no new ones."""
    DEAD = auto()
    """The incarnation has ended, or counts as ended; the next one must welcome this client first."""
    REFUSED = auto()
    """The node answered Hello with a refusal, which is kept; Hello is repeated with every heartbeat."""


class LinkEvent(Enum):
    """What moves a link."""

    WELCOME = auto()
    """It answered Hello."""
    HEARD = auto()
    """Any other message of the same incarnation."""
    CLOSED = auto()
    """The transport lost the connection."""
    SILENT = auto()
    """Not heard for suspect_s."""
    LOST = auto()
    """Refused connection, another incarnation, silence for dead_after_s, or an engine with work and no progress."""
    HELLO_REFUSED = auto()
    """It answered Hello with a refusal."""


_S, _E = LinkState, LinkEvent
LINK_TABLE = Table(
    "link",
    _S.CONNECTING,
    {
        (_S.CONNECTING, _E.WELCOME): _S.ALIVE,
        (_S.CONNECTING, _E.CLOSED): _S.CONNECTING,
        (_S.CONNECTING, _E.HELLO_REFUSED): _S.REFUSED,
        (_S.ALIVE, _E.WELCOME): _S.ALIVE,
        (_S.ALIVE, _E.HEARD): _S.ALIVE,
        (_S.ALIVE, _E.CLOSED): _S.SUSPECT,
        (_S.ALIVE, _E.SILENT): _S.SUSPECT,
        (_S.ALIVE, _E.LOST): _S.DEAD,
        (_S.ALIVE, _E.HELLO_REFUSED): _S.REFUSED,
        (_S.SUSPECT, _E.WELCOME): _S.ALIVE,
        (_S.SUSPECT, _E.HEARD): _S.ALIVE,
        (_S.SUSPECT, _E.CLOSED): _S.SUSPECT,
        (_S.SUSPECT, _E.SILENT): _S.SUSPECT,
        (_S.SUSPECT, _E.LOST): _S.DEAD,
        (_S.SUSPECT, _E.HELLO_REFUSED): _S.REFUSED,
        (_S.DEAD, _E.WELCOME): _S.ALIVE,
        (_S.DEAD, _E.CLOSED): _S.DEAD,
        (_S.DEAD, _E.HELLO_REFUSED): _S.REFUSED,
        (_S.REFUSED, _E.WELCOME): _S.ALIVE,
        (_S.REFUSED, _E.CLOSED): _S.REFUSED,
        (_S.REFUSED, _E.HELLO_REFUSED): _S.REFUSED,
    },
)


@dataclass(slots=True)
class Link:
    """One link, as its client sees it."""

    endpoint: str
    static: bool
    machine: Machine[LinkState, LinkEvent]
    peer: Incarnation | None = None
    welcome: Welcome | None = None
    status: Status | None = None
    refusal: str = ""
    last_heard: float = 0.0
    last_hello: float = -1e9
    last_progress: float = 0.0
    dead_since: float = 0.0
    last_announced: float = 0.0
    heartbeat_no: int = 0
    """Counts on over incarnations: a wanted set never looks older than the one before it."""
    link_seq: int = 0
    """Highest Tokens number seen."""
    wedged: bool = False
    """Lost because its engine makes no progress; its process still runs."""
    probing: bool = False
    needs_reset: bool = False
    past: dict[Incarnation, float] = field(default_factory=dict)
    """Incarnations that were here before, and when the next one was welcomed."""

    def is_late(self, sender: Incarnation, now: float) -> bool:
        """Whether this comes from an incarnation whose successor was just welcomed."""
        followed = self.past.get(sender)
        return followed is not None and now - followed < LATE_S

    def follow(self, sender: Incarnation, now: float) -> None:
        """Another incarnation is here from now on."""
        self.past = {earlier: since for earlier, since in self.past.items() if now - since < LATE_S}
        if self.peer is not None:
            self.past[self.peer] = now
        self.peer, self.status = sender, None

    @property
    def state(self) -> LinkState:
        """The present state."""
        return self.machine.state

    @property
    def usable(self) -> bool:
        """May get new work: alive, welcomed and not draining."""
        return self.state is LinkState.ALIVE and not (self.status is not None and self.status.draining)

    @property
    def up(self) -> bool:
        """Messages may be sent: the peer is known and not dead."""
        return self.state in (LinkState.ALIVE, LinkState.SUSPECT)


LinkInput = Received | Tick | LinkConnected | LinkClosed | ProbeAnswered
"""The events that concern links."""


@dataclass(slots=True)
class LinkUpdate:
    """What an event on the links led to."""

    actions: list[Action] = field(default_factory=list)
    up: Link | None = None
    """The link whose node just answered Hello."""
    lost: list[Incarnation] = field(default_factory=list)
    """Incarnations that ended, or count as ended. Each is reported once."""
    link: Link | None = None
    message: Message | None = None
    """A message for the owner of the links, and the link to the live node that sent it."""


@dataclass(slots=True)
class LinkTable:
    """All links of one client."""

    hello: Hello
    timers: Timers
    links: dict[str, Link] = field(default_factory=dict)
    by_peer: dict[Incarnation, Link] = field(default_factory=dict)
    _ticks: SleepDetector = field(init=False)

    def __post_init__(self) -> None:
        self._ticks = SleepDetector(self.timers)

    def add(self, endpoint: str, now: float, *, static: bool = False) -> list[Action]:
        """Open a link to the node at this endpoint, unless there is one.

        With MOST_LINKS links the oldest that never answered is replaced; if all answered, the new one is not opened.
        """
        link = self.links.get(endpoint)
        if link is not None:
            link.last_announced = now
            link.static = link.static or static
            return []
        actions: list[Action] = []
        if not static and len(self.links) >= MOST_LINKS:
            silent = min(
                (other for other in self.links.values() if other.welcome is None and not other.static),
                key=lambda other: other.last_announced,
                default=None,
            )
            if silent is None:
                return []
            del self.links[silent.endpoint]
            actions.append(CloseLink(silent.endpoint))
        link = Link(endpoint, static, Machine(LINK_TABLE, endpoint), last_announced=now, dead_since=now)
        self.links[endpoint] = link
        return [*actions, OpenLink(endpoint), *self._say_hello(link, now)]

    def peer(self, incarnation: Incarnation) -> Link | None:
        """The link to this incarnation, while it is the one at its address."""
        return self.by_peer.get(incarnation)

    def is_wedged(self, peer: Incarnation) -> bool:
        """Whether this lost incarnation still runs, with an engine that makes no progress."""
        return any(link.wedged for link in self.links.values() if link.peer == peer)

    def handle(self, event: LinkInput, now: float) -> LinkUpdate:
        """Take in one event. The deaths that it revealed are part of the result."""
        update = LinkUpdate()
        if isinstance(event, Tick):
            self._on_tick(update, now)
            return update
        link = self.links.get(event.endpoint)
        if isinstance(event, Received):
            self._on_message(link, event.envelope.sender, event.envelope.message, update, now)
            return update
        if link is None:
            return update
        match event:
            case LinkConnected():
                update.actions += self._say_hello(link, now)
            case LinkClosed():
                link.machine.move(LinkEvent.CLOSED, now)
                if link.state is LinkState.SUSPECT:
                    update.actions += self._probe(link)
            case ProbeAnswered(result=result):
                link.probing = False
                if result == "refused" and link.state is LinkState.SUSPECT:
                    self._lose(link, update, now)
            case _:
                assert_never(event)
        return update

    def _on_message(
        self, link: Link | None, sender: Incarnation, message: Message, update: LinkUpdate, now: float
    ) -> None:
        if link is not None:
            if isinstance(message, Welcome):
                self._on_welcome(link, sender, message, update, now)
                return
            if isinstance(message, HelloRefused):
                self._on_hello_refused(link, message, update, now)
                return
            self._on_heard(link, sender, update, now, unknown=isinstance(message, WrongIncarnation))
        known = self.by_peer.get(sender)
        if known is None or isinstance(message, Welcome | HelloRefused | WrongIncarnation):
            return
        if isinstance(message, Status):
            self._on_status(known, message, now)
        update.link, update.message = known, message

    def _on_welcome(self, link: Link, sender: Incarnation, message: Welcome, update: LinkUpdate, now: float) -> None:
        """A node answered: this incarnation is alive at this address."""
        other = self.by_peer.get(sender)
        if other is not None and other is not link:
            return  # one link per incarnation: a second address of it waits until the first one fails
        if link.peer != sender:
            if link.is_late(sender, now):
                return
            if link.up:
                self._lose(link, update, now)
            link.follow(sender, now)
            update.actions.append(BindPeer(link.endpoint, sender))
        link.welcome, link.refusal, link.wedged = message, "", False
        link.link_seq = 0  # the node may have forgotten this client meanwhile, and then counts from 0 again
        link.last_heard = link.last_progress = now
        link.machine.move(LinkEvent.WELCOME, now)
        self.by_peer[sender] = link
        update.up = link

    def _on_hello_refused(self, link: Link, message: HelloRefused, update: LinkUpdate, now: float) -> None:
        """The node refuses this client. The reason is kept, and Hello repeated with every heartbeat."""
        if link.up:
            self._lose(link, update, now)
        link.refusal = message.reason
        link.machine.move(LinkEvent.HELLO_REFUSED, now)

    def _on_heard(self, link: Link, sender: Incarnation, update: LinkUpdate, now: float, *, unknown: bool) -> None:
        """Any other message: the same incarnation was heard; another one ends it. `unknown`: it does not know us."""
        if link.is_late(sender, now):
            return
        if link.peer == sender and link.up:
            link.last_heard = now
            if link.state is not LinkState.ALIVE:
                link.machine.move(LinkEvent.HEARD, now)
            if unknown and now - link.last_hello >= HELLO_SPACING_S:
                update.actions += self._say_hello(link, now)
            return
        if link.up:
            self._lose(link, update, now)
        update.actions += self._say_hello(link, now)

    def _on_status(self, link: Link, message: Status, now: float) -> None:
        """The newest wins. A new step, a layer of a long step, or no work waiting count as progress."""
        old = link.status
        if old is not None and message.status_no <= old.status_no:
            return
        link.status = message
        if old is None or _progress(message) != _progress(old) or not message.work_waiting:
            link.last_progress = now

    def _on_tick(self, update: LinkUpdate, now: float) -> None:
        """Judge silences, repeat Hellos, close links that are long dead."""
        self._forgive_own_sleep(now)
        for link in list(self.links.values()):
            if link.up:
                self._judge(link, update, now)
            elif now - link.last_hello >= self.timers.heartbeat_s:
                update.actions += self._say_hello(link, now)
            if not link.up and not link.static and self._forgotten(link, now):
                update.actions.append(CloseLink(link.endpoint))
                del self.links[link.endpoint]

    def _forgive_own_sleep(self, now: float) -> None:
        slept_s = self._ticks.slept_s(now)
        for link in self.links.values() if slept_s else ():
            link.last_heard = min(now, link.last_heard + slept_s)
            link.last_progress = min(now, link.last_progress + slept_s)

    def _judge(self, link: Link, update: LinkUpdate, now: float) -> None:
        silence = now - link.last_heard
        stalled = now - link.last_progress > self.timers.engine_stall_s
        if silence > self.timers.dead_after_s or stalled:
            link.wedged = silence <= self.timers.dead_after_s
            self._lose(link, update, now)
            update.actions += self._say_hello(link, now)
        elif silence > self.timers.suspect_s:
            link.machine.move(LinkEvent.SILENT, now)
            update.actions += self._probe(link)

    def _forgotten(self, link: Link, now: float) -> bool:
        return now - max(link.dead_since, link.last_announced) > FORGET_AFTER_S

    def _probe(self, link: Link) -> list[Action]:
        if link.probing:
            return []
        link.probing = True
        return [Probe(link.endpoint)]

    def _say_hello(self, link: Link, now: float) -> list[Action]:
        link.last_hello = now
        reset: list[Action] = [ResetLink(link.endpoint)] if link.needs_reset else []
        link.needs_reset = False
        return [*reset, SendHello(link.endpoint, self.hello)]

    def _lose(self, link: Link, update: LinkUpdate, now: float) -> None:
        link.machine.move(LinkEvent.LOST, now)
        link.dead_since = now
        link.needs_reset = True
        if link.peer is not None:
            self.by_peer.pop(link.peer, None)
            update.lost.append(link.peer)

    def check_invariants(self) -> None:
        """Raises InvariantError when the two maps disagree."""
        for peer, link in self.by_peer.items():
            if link.peer != peer or self.links.get(link.endpoint) is not link:
                raise InvariantError(f"link {link.endpoint} is filed under {peer}, not {link.peer}")
        for endpoint, link in self.links.items():
            if link.endpoint != endpoint:
                raise InvariantError(f"link {link.endpoint} is filed under {endpoint}")
            if link.up and (link.peer is None or self.by_peer.get(link.peer) is not link):
                raise InvariantError(f"live link {endpoint} has no peer")


def _progress(status: Status) -> tuple[int, int]:
    return status.steps_done, status.progress_no
