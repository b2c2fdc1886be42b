"""The simulated control network: connections between processes, with delay, cuts, blips, refusal. Pure and seeded.

Guarantees, as of ZeroMQ over TCP:
- Messages of one connection arrive in order.
- A connection that breaks loses some of the messages in flight; messages sent after the reconnection may overtake the
  survivors.
- A cut holds messages back, and breaks the connection when it outlasts the link timeout.
- A process that ends closes its connections. An address without a listener refuses connections.
- Without a connection, a node drops its message for a client and a client keeps its message in the outbox.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.events import LinkClosed, LinkConnected, ProbeAnswered, Received
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Envelope
from kvferry.ops.simulate.clock import EventLoop
from kvferry.ops.simulate.connection import Connection, Direction, Endpoint, Flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds that a message is in flight: `base_s` plus up to `jitter_s`; sometimes much longer."""

    base_s: float = 0.0005
    jitter_s: float = 0.001
    slow_share: float = 0.0
    slow_s: float = 0.0
    """Upper bound of the extra delay of `slow_share` of the messages."""


@dataclass(slots=True)
class Network:
    """All control connections. A host is the name of a process and stays the same over restarts."""

    loop: EventLoop
    rng: random.Random
    timers: Timers
    delays: Delays = field(default_factory=Delays)
    listeners: dict[str, Endpoint] = field(default_factory=dict)
    slow_hosts: dict[str, float] = field(default_factory=dict)
    """Host -> extra seconds for each message from or to it."""
    _cuts: dict[tuple[str, str], float] = field(default_factory=dict)
    """(from, to) -> time at which the cut heals."""
    _links: dict[tuple[Incarnation, str], Connection] = field(default_factory=dict)
    _served: dict[Incarnation, dict[Incarnation, Connection]] = field(default_factory=dict)
    """Listener -> client -> its present connection."""
    on_message: Callable[[Endpoint, Endpoint, Envelope], None] | None = None
    """Called with sender, receiver and envelope before every delivery; for tests."""
    num_lost: int = 0
    """Messages in flight when their connection broke, and lost."""
    num_late: int = 0
    """Messages in flight when their connection broke, and delivered later."""
    num_held: int = 0
    """Messages that waited for a cut to heal or were lost with it."""

    # -- calls of processes

    def listen(self, process: Endpoint) -> None:
        """Accept connections at the address of this process."""
        self.listeners[process.address] = process
        self._served[process.incarnation] = {}

    def open_link(self, client: Endpoint, address: str) -> None:
        """Open a client socket; it connects when possible, and again after every break."""
        connection = Connection(client, address, retry_s=self.timers.reconnect_min_s)
        self._links[client.incarnation, address] = connection
        self.loop.after(self._delay(client.host, ""), self._try_connect, connection)

    def close_link(self, client: Endpoint, address: str) -> None:
        """Close a client socket; waiting messages are dropped."""
        connection = self._links.pop((client.incarnation, address), None)
        if connection is not None:
            connection.closed = True
            self._break(connection, share_lost=1.0, notify=False)

    def reset_link(self, client: Endpoint, address: str) -> None:
        """Drop the messages that wait for the incarnation at the other end."""
        connection = self._links.get((client.incarnation, address))
        if connection is not None:
            connection.outbox.clear()

    def send_on_link(self, client: Endpoint, address: str, envelope: Envelope) -> None:
        """Send from a client to the listener of its link; the message waits while the link is down."""
        connection = self._links.get((client.incarnation, address))
        if connection is None:
            return
        if connection.server is None:
            connection.outbox.append(envelope)
            return
        self._send(connection, connection.to_server, envelope)

    def is_served(self, server: Endpoint, peer: Incarnation) -> bool:
        """Whether this peer is connected to the socket of this node."""
        return peer in self._served.get(server.incarnation, ())

    def send_to_peer(self, server: Endpoint, peer: Incarnation, envelope: Envelope) -> None:
        """Send from a node to a client; dropped when the client is not connected."""
        connection = self._served.get(server.incarnation, {}).get(peer)
        if connection is not None:
            self._send(connection, connection.to_client, envelope)

    def probe(self, client: Endpoint, address: str) -> None:
        """Try a bare connection; the client receives ProbeAnswered."""
        listener = self.listeners.get(address)
        host = address if listener is None else listener.host
        if self.is_cut(client.host, host) or self.is_cut(host, client.host):
            self.loop.after(1.0, client.post, ProbeAnswered(address, "unknown"))
            return
        result = ProbeAnswered(address, "refused" if listener is None else "accepted")
        self.loop.after(2 * self._delay(client.host, host), client.post, result)

    # -- faults

    def process_ended(self, process: Endpoint) -> None:
        """Close all sockets of an ended process, as the operating system does."""
        if self.listeners.get(process.address) is process:
            del self.listeners[process.address]
        for connection in list(self._served.pop(process.incarnation, {}).values()):
            self._break(connection, share_lost=self.rng.random(), notify=True)
        for key in [key for key in self._links if key[0] == process.incarnation]:
            connection = self._links.pop(key)
            connection.closed = True
            self._break(connection, share_lost=self.rng.random(), notify=False)

    def process_froze(self, process: Endpoint) -> None:
        """Break the connections of a frozen process after the link timeout, unless it thaws before."""
        self.loop.after(self.timers.link_timeout_s, self._still_frozen, process)

    def blip(self, host_a: str, host_b: str) -> None:
        """Break the connections between two hosts; they can be made again immediately."""
        for connection in self._between(host_a, host_b):
            self._break(connection, share_lost=0.5, notify=True)

    def speed_up(self, host: str) -> None:
        self.slow_hosts.pop(host, None)

    def cut(self, from_host: str, to_host: str, duration_s: float) -> None:
        """Block one direction of all connections between two hosts for this long."""
        now = self.loop.now()
        if self._cuts.get((from_host, to_host), 0.0) > now + duration_s:
            return
        self._cuts[from_host, to_host] = now + duration_s
        for connection in self._between(from_host, to_host):
            self._hold(connection)
        self.loop.after(duration_s, self._heal, from_host, to_host)

    # -- inside

    def _between(self, host_a: str, host_b: str) -> list[Connection]:
        pair = {host_a, host_b}
        return [c for c in self._links.values() if c.server is not None and {c.client.host, c.server.host} == pair]

    def is_cut(self, from_host: str, to_host: str) -> bool:
        """Whether this direction is cut now."""
        return self._cuts.get((from_host, to_host), 0.0) > self.loop.now()

    def _delay(self, from_host: str, to_host: str) -> float:
        delays, rng = self.delays, self.rng
        delay = delays.base_s + delays.jitter_s * rng.random()
        if delays.slow_share and rng.random() < delays.slow_share:
            delay += delays.slow_s * rng.random()
        if self.slow_hosts:
            delay += self.slow_hosts.get(from_host, 0.0) + self.slow_hosts.get(to_host, 0.0)
        return delay

    def _try_connect(self, connection: Connection) -> None:
        client = connection.client
        if connection.closed or connection.server is not None:
            return
        listener = self.listeners.get(connection.address)
        reachable = listener is not None and not (listener.frozen or client.frozen)
        if listener is not None and (
            self.is_cut(client.host, listener.host) or self.is_cut(listener.host, client.host)
        ):
            reachable = False
        if listener is None or not reachable:
            self.loop.after(connection.retry_s, self._try_connect, connection)
            connection.retry_s = min(2 * connection.retry_s, self.timers.reconnect_max_s)
            return
        connection.server = listener
        connection.epoch += 1
        connection.retry_s = self.timers.reconnect_min_s
        connection.to_server, connection.to_client = Direction(), Direction()
        self._served[listener.incarnation][client.incarnation] = connection
        client.post(LinkConnected(connection.address))
        if connection.server is not listener:
            return  # the client ended while it handled the event
        waiting, connection.outbox = connection.outbox, []
        for envelope in waiting:
            self._send(connection, connection.to_server, envelope)

    def _send(self, connection: Connection, direction: Direction, envelope: Envelope) -> None:
        if direction.held is not None:
            direction.held.append(envelope)
            self.num_held += 1
            return
        assert connection.server is not None
        delay = self._delay(connection.client.host, connection.server.host)
        at = max(self.loop.now() + delay, direction.last_at)
        direction.last_at = at
        flight = Flight(envelope)
        direction.in_flight.append(flight)
        self.loop.at(at, self._arrive, connection, direction, flight)

    def _arrive(self, connection: Connection, direction: Direction, flight: Flight) -> None:
        if not direction.in_flight or direction.in_flight[0] is not flight:
            return  # the connection broke meanwhile
        direction.in_flight.popleft()
        assert connection.server is not None
        self._deliver(connection, direction is connection.to_server, connection.server, flight.envelope)

    def _deliver(self, connection: Connection, to_server: bool, server: Endpoint, envelope: Envelope) -> None:
        to, origin = (server, connection.client) if to_server else (connection.client, server)
        if not to.alive or (not to_server and connection.closed):
            return
        if self.on_message is not None:
            self.on_message(origin, to, envelope)
        to.post(Received(envelope, "" if to_server else connection.address))

    def _break(self, connection: Connection, *, share_lost: float, notify: bool) -> None:
        server = connection.server
        if server is None:
            return
        connection.server = None
        connection.epoch += 1
        served = self._served.get(server.incarnation)
        if served is not None:
            served.pop(connection.client.incarnation, None)
        for direction, to_server in ((connection.to_server, True), (connection.to_client, False)):
            num_in_flight = len(direction.in_flight)
            survivors = [flight.envelope for flight in direction.in_flight if self.rng.random() >= share_lost]
            direction.in_flight.clear()
            direction.held = None
            self.num_late += len(survivors)
            self.num_lost += num_in_flight - len(survivors)
            for envelope in survivors:  # in any order, possibly after messages of the next connection
                self.loop.after(0.9 * self.rng.random(), self._deliver, connection, to_server, server, envelope)
        if notify and connection.client.alive:
            self.loop.after(self._delay(server.host, connection.client.host), self._notify_closed, connection)
        if not connection.closed:
            self.loop.after(connection.retry_s * (0.5 + self.rng.random()), self._try_connect, connection)

    def _notify_closed(self, connection: Connection) -> None:
        if not connection.closed and not connection.up:
            connection.client.post(LinkClosed(connection.address))

    def _still_frozen(self, process: Endpoint) -> None:
        if not process.alive or not process.frozen:
            return
        opened = [c for key, c in self._links.items() if key[0] == process.incarnation]
        for connection in [*self._served.get(process.incarnation, {}).values(), *opened]:
            self._break(connection, share_lost=self.rng.random(), notify=True)

    def _hold(self, connection: Connection) -> None:
        """Hold the messages that are sent from now on in a direction that is cut."""
        assert connection.server is not None
        client, server = connection.client.host, connection.server.host
        for direction, cut in (
            (connection.to_server, self.is_cut(client, server)),
            (connection.to_client, self.is_cut(server, client)),
        ):
            if cut and direction.held is None:
                direction.held = []
                self.loop.after(self.timers.link_timeout_s, self._time_out, connection, connection.epoch)

    def _time_out(self, connection: Connection, epoch: int) -> None:
        """Break the connection when the cut outlasted the link timeout."""
        if connection.epoch != epoch or connection.server is None:
            return
        client, server = connection.client.host, connection.server.host
        if self.is_cut(client, server) or self.is_cut(server, client):
            self._break(connection, share_lost=1.0, notify=True)

    def _heal(self, from_host: str, to_host: str) -> None:
        if self.is_cut(from_host, to_host):
            return  # cut again for longer
        for connection in self._between(from_host, to_host):
            assert connection.server is not None
            direction = connection.to_server if connection.client.host == from_host else connection.to_client
            held, direction.held = direction.held, None
            for envelope in held or ():
                self._send(connection, direction, envelope)
