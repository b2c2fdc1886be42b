"""The client's side of its links: which nodes are there, which of them live. Pure.

Both router workers and prefill nodes (towards decode nodes) own one. Protocol rules 6, 9, 10: a peer is alive on the
link where it is needed; a closed connection makes it suspect; refusal or another incarnation means dead at once;
silence counts only while this process itself runs; a peer whose engine has work and does not move is dead too.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import (
    Action,
    BindPeer,
    CloseLink,
    OpenLink,
    Probe,
    ResetLink,
    SendHello,
)
from kvferry.common.cluster.sleep_detector import SleepDetector
from kvferry.common.cluster.table import (
    Machine,
    Table,
)
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Hello, HelloRefused, Status, Welcome

FORGET_AFTER_S = 60.0
"""A dead link that nobody announces is dropped after this long."""
MOST_LINKS = 1024
"""Links that are kept for what others name: each costs descriptors, and anybody may name anything."""
LATE_S = 2.0
"""What comes this soon from a life that another one has followed is late, and changes nothing. Not for ever: two lives
may be welcomed in the wrong order, and the one that lives says so again."""
HELLO_SPACING_S = 0.1
"""Between two Hellos to a node that does not know us: each of our messages makes it say so."""


class LinkState(Enum):
    """What may be done over a link."""

    CONNECTING = auto()
    """No Welcome yet."""
    ALIVE = auto()
    """Welcomed, and heard lately: may get new work."""
    SUSPECT = auto()
    """Silent for a while, or its connection broke: keeps what it has, gets no new work."""
    DEAD = auto()
    """That life has ended, or counts as ended; whoever lives there next must welcome us first."""
    REFUSED = auto()
    """The node answered Hello with a refusal, which is kept; it is asked again with every beat."""


class LinkEvent(Enum):
    """What moves a link."""

    WELCOME = auto()
    """It answered Hello."""
    HEARD = auto()
    """Any other message of the same life."""
    CLOSED = auto()
    """The transport lost the connection."""
    SILENT = auto()
    """Not heard for suspect_s."""
    LOST = auto()
    """Refused connection, another life, silence for dead_after_s, or an engine that has work and does not move."""
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
    """Goes on over lives: a list never looks older than one before it."""
    link_seq: int = 0
    """Highest Tokens number seen."""
    wedged: bool = False
    """It was lost since its engine does not move: its process lives."""
    probing: bool = False
    needs_reset: bool = False
    past: dict[Incarnation, float] = field(default_factory=dict)
    """Lives that were here before this one, and when they were followed by another."""

    def is_late(self, sender: Incarnation, now: float) -> bool:
        """Whether this comes from a life that another one has just followed."""
        followed = self.past.get(sender)
        return followed is not None and now - followed < LATE_S

    def follow(self, sender: Incarnation, now: float) -> None:
        """Another life is here from now on."""
        self.past = {life: since for life, since in self.past.items() if now - since < LATE_S}
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


@dataclass(slots=True)
class LinkTable:
    """All links of one client. Methods return what to do; lives that ended are collected in `take_lost()`."""

    hello: Hello
    timers: Timers
    links: dict[str, Link] = field(default_factory=dict)
    by_peer: dict[Incarnation, Link] = field(default_factory=dict)
    _lost: list[Incarnation] = field(default_factory=list)
    _ticks: SleepDetector = field(init=False)

    def __post_init__(self) -> None:
        self._ticks = SleepDetector(self.timers)

    def add(self, endpoint: str, now: float, *, static: bool = False) -> list[Action]:
        """Know of a node at this endpoint (no effect when it is known already).

        With MOST_LINKS the oldest one that never answered gives way; where all did, the new one is not taken.
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
        """The link to this process life, while it is the one that lives there."""
        return self.by_peer.get(incarnation)

    def take_lost(self) -> list[Incarnation]:
        """Lives that ended since the last call, each once."""
        lost, self._lost = self._lost, []
        return lost

    def is_wedged(self, peer: Incarnation) -> bool:
        """Whether this life, which was lost, lives on and its engine does not move."""
        return any(link.wedged for link in self.links.values() if link.peer == peer)

    def on_connected(self, endpoint: str, now: float) -> list[Action]:
        """Every connection starts with a Hello."""
        link = self.links.get(endpoint)
        return [] if link is None else self._say_hello(link, now)

    def on_closed(self, endpoint: str, now: float) -> list[Action]:
        """The connection broke: suspect, and a probe tells whether anybody still listens."""
        link = self.links.get(endpoint)
        if link is None:
            return []
        link.machine.move(LinkEvent.CLOSED, now)
        return self._probe(link) if link.state is LinkState.SUSPECT else []

    def on_probe(self, endpoint: str, refused: bool, now: float) -> list[Action]:
        """Nobody listens there: that life has ended."""
        link = self.links.get(endpoint)
        if link is None:
            return []
        link.probing = False
        if refused and link.state is LinkState.SUSPECT:
            self._lose(link, now)
        return []

    def on_welcome(self, endpoint: str, sender: Incarnation, message: Welcome, now: float) -> list[Action]:
        """A node answered: it lives, and it is this life."""
        link = self.links.get(endpoint)
        other = self.by_peer.get(sender)
        if link is None or (other is not None and other is not link):
            return []  # one link a life: a second address of it waits until the first one fails
        actions: list[Action] = []
        if link.peer != sender:
            if link.is_late(sender, now):
                return []
            if link.up:
                self._lose(link, now)
            link.follow(sender, now)
            actions.append(BindPeer(endpoint, sender))
        link.welcome, link.refusal, link.wedged = message, "", False
        link.link_seq = 0  # it may have forgotten us in between, and counts anew then
        link.last_heard = link.last_progress = now
        link.machine.move(LinkEvent.WELCOME, now)
        self.by_peer[sender] = link
        return actions

    def on_hello_refused(self, endpoint: str, message: HelloRefused, now: float) -> None:
        """The node will not have us: remembered, and asked again with every beat."""
        link = self.links.get(endpoint)
        if link is None:
            return
        if link.up:
            self._lose(link, now)
        link.refusal = message.reason
        link.machine.move(LinkEvent.HELLO_REFUSED, now)

    def on_heard(self, endpoint: str, sender: Incarnation, now: float, *, unknown: bool = False) -> list[Action]:
        """Anything else came: the same life is heard, another one ends it. Returns a Hello when one is due.

        unknown: it came to say that it does not know us (any more).
        """
        link = self.links.get(endpoint)
        if link is None or link.is_late(sender, now):
            return []
        if link.peer == sender and link.up:
            link.last_heard = now
            if link.state is not LinkState.ALIVE:
                link.machine.move(LinkEvent.HEARD, now)
            return self._say_hello(link, now) if unknown and now - link.last_hello >= HELLO_SPACING_S else []
        if link.up:
            self._lose(link, now)
        return self._say_hello(link, now)

    def on_status(self, link: Link, message: Status, now: float) -> None:
        """Newest wins; progress is a new step, a layer of one that takes long, or no work waiting."""
        old = link.status
        if old is not None and message.status_no <= old.status_no:
            return
        link.status = message
        if old is None or _progress(message) != _progress(old) or not message.work_waiting:
            link.last_progress = now

    def tick(self, now: float) -> list[Action]:
        """Judge silences, repeat Hellos, forget the long dead."""
        self._forgive_own_sleep(now)
        actions: list[Action] = []
        for link in list(self.links.values()):
            if link.up:
                actions += self._judge(link, now)
            elif now - link.last_hello >= self.timers.heartbeat_s:
                actions += self._say_hello(link, now)
            if not link.up and not link.static and self._forgotten(link, now):
                actions.append(CloseLink(link.endpoint))
                del self.links[link.endpoint]
        return actions

    def _forgive_own_sleep(self, now: float) -> None:
        slept_s = self._ticks.slept_s(now)
        for link in self.links.values() if slept_s else ():
            link.last_heard = min(now, link.last_heard + slept_s)
            link.last_progress = min(now, link.last_progress + slept_s)

    def _judge(self, link: Link, now: float) -> list[Action]:
        silence = now - link.last_heard
        stalled = now - link.last_progress > self.timers.engine_stall_s
        if silence > self.timers.dead_after_s or stalled:
            link.wedged = silence <= self.timers.dead_after_s
            self._lose(link, now)
            return self._say_hello(link, now)
        if silence > self.timers.suspect_s:
            link.machine.move(LinkEvent.SILENT, now)
            return self._probe(link)
        return []

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

    def _lose(self, link: Link, now: float) -> None:
        link.machine.move(LinkEvent.LOST, now)
        link.dead_since = now
        link.needs_reset = True
        if link.peer is not None:
            self.by_peer.pop(link.peer, None)
            self._lost.append(link.peer)

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
