"""One incarnation of a simulated process: passes events to its core and performs the actions that the core returns.

Keeps the order of a real shell: one event at a time, actions in order, the inbox before the tick. Decides nothing.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import BindPeer, CloseLink, OpenLink, Probe, ResetLink, Send, SendHello
from kvferry.common.cluster.events import Event, Tick
from kvferry.common.protocol.messages import CLIENT_SPEAKS, Envelope, Message
from kvferry.ops.simulate.clock import EventLoop
from kvferry.ops.simulate.network import Network


class Process(ABC):
    """Common part of router workers and nodes. `host` is its name; a later incarnation has the same."""

    def __init__(
        self, loop: EventLoop, network: Network, host: str, incarnation: Incarnation, address: str, tick_s: float
    ) -> None:
        self.loop = loop
        self.network = network
        self.host = host
        self.incarnation = incarnation
        self.address = address
        self.tick_s = tick_s
        self.alive = True
        self.frozen = False
        self.stalled = False
        self.awake_since = loop.now()
        self.crash_after_actions = -1
        """Crash instead of performing the action with this number, counted from now; -1: never."""
        self.on_end: Callable[[Process, str], None] | None = None
        self.num_events = 0
        self.check_every = 0
        """Check the core's invariants after every n-th event; 0: never."""
        self.trace: Callable[[Process, object], None] | None = None
        self._bound: dict[Incarnation, str] = {}
        self._inbox: list[tuple[Callable[..., None], tuple[object, ...]]] = []

    def start(self, rng: random.Random) -> None:
        """Start the tick, at a random phase."""
        self.loop.after(self.tick_s * rng.random(), self._tick)

    # -- events

    def post(self, event: Event) -> None:
        """Handle an event now, or after waking up."""
        if self.asleep:
            self._inbox.append((self._handle, (event,)))
        elif self.alive:
            self._handle(event)

    def when_awake(self, callback: Callable[..., None], *arguments: object) -> None:
        """Run a callback of this process now, or after waking up."""
        if self.asleep:
            self._inbox.append((callback, arguments))
        elif self.alive:
            callback(*arguments)

    def _tick(self) -> None:
        if not self.alive:
            return
        if not self.asleep:
            self._handle(Tick())
        self.loop.after(self.tick_s, self._tick)

    def _handle(self, event: Event) -> None:
        if not self.alive:
            return
        if self.trace is not None:
            self.trace(self, event)
        self.num_events += 1
        self.perform(self.react(event, self.loop.now()))
        if self.check_every and self.num_events % self.check_every == 0:
            self.check_invariants()

    @abstractmethod
    def react(self, event: Event, now: float) -> Sequence[object]:
        """Pass the event to the core; return its actions."""

    @abstractmethod
    def perform_own(self, action: object) -> None:
        """Perform an action that only this kind of process knows; raise InvariantError on any other."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Check the invariants of the core."""

    def perform(self, actions: Sequence[object]) -> None:
        """Perform actions in order, up to a crash among them."""
        for action in actions:
            if not self.alive:
                return
            if self.crash_after_actions >= 0:
                if self.crash_after_actions == 0:
                    self.end("crash at an action")
                    return
                self.crash_after_actions -= 1
            if self.trace is not None:
                self.trace(self, action)
            self._perform(action)

    def _perform(self, action: object) -> None:
        match action:
            case Send(peer, message):
                self._send(peer, message)
            case SendHello(address, message):
                self.network.send_on_link(self, address, Envelope(self.incarnation, Incarnation(""), message))
            case BindPeer(address, peer):
                self._bound = {known: at for known, at in self._bound.items() if at != address}
                self._bound[peer] = address
            case OpenLink(address):
                self.network.open_link(self, address)
            case CloseLink(address):
                self.network.close_link(self, address)
                self._bound = {known: at for known, at in self._bound.items() if at != address}
            case ResetLink(address):
                self.network.reset_link(self, address)
            case Probe(address):
                self.network.probe(self, address)
            case _:
                self.perform_own(action)

    def _send(self, peer: Incarnation, message: Message) -> None:
        """Send to a node or to a client. The message type decides: of two processes with both roles each is both.

        A message to a peer that is not connected is dropped.
        """
        envelope = Envelope(self.incarnation, peer, message)
        address = self._bound.get(peer)
        if address is not None and isinstance(message, CLIENT_SPEAKS):
            self.network.send_on_link(self, address, envelope)
        elif self.network.is_served(self, peer):
            self.network.send_to_peer(self, peer, envelope)

    # -- faults

    def end(self, why: str) -> None:
        """End the process: it handles no event and performs no action from now on."""
        if not self.alive:
            return
        self.alive = False
        self._inbox.clear()
        self.network.process_ended(self)
        if self.on_end is not None:
            self.on_end(self, why)

    def freeze(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.frozen:
            self.frozen = True
            self.network.process_froze(self)

    def thaw(self) -> None:
        """SIGCONT: events that arrived meanwhile are handled before the late tick."""
        if self.alive and self.frozen:
            self.frozen = False
            self._wake()

    def stall(self) -> None:
        """Block the thread of messages and ticks; sockets and engine keep running."""
        self.stalled = self.alive

    def end_stall(self) -> None:
        """Unblock: events that arrived meanwhile are handled before the late tick."""
        if self.alive and self.stalled:
            self.stalled = False
            self._wake()

    @property
    def asleep(self) -> bool:
        """Frozen or stalled: handles no events now."""
        return self.frozen or self.stalled

    def awake_for(self, seconds: float) -> bool:
        """Whether it is alive and has handled its events for at least this long."""
        return self.alive and not self.asleep and self.loop.now() - self.awake_since >= seconds

    def _wake(self) -> None:
        if self.asleep:
            return
        self.awake_since = self.loop.now()
        inbox, self._inbox = self._inbox, []
        for callback, arguments in inbox:
            callback(*arguments)
