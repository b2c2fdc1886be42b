"""The control thread of a node: owns the sockets and the core, performs what the core decides. Decides nothing.

Everything from other threads (steps done, pieces sent or written, drain) comes through one inbox. A tick comes only
after all that waited has been taken in, so that a process that slept does not judge others by its own sleep.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.common.base.clock import Clock
from kvferry.common.base.errors import (
    InvariantError,
    ProtocolError,
)
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import (
    Action,
    BindPeer,
    CloseKv,
    CloseLink,
    CloseSession,
    ExitProcess,
    ExpectPieces,
    ForgetPieces,
    OpenKv,
    OpenLink,
    Probe,
    ResetLink,
    RunStep,
    Send,
    SendHello,
    SendPiece,
    StopPieces,
)
from kvferry.common.cluster.events import (
    DrainRequested,
    Event,
    Received,
    Tick,
)
from kvferry.common.cluster.node_core import NodeCore
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.engine.engine_thread import EngineThread
from kvferry.common.kv_transfer.interface import KvMover
from kvferry.common.node.journal import Journal
from kvferry.common.protocol.messages import CLIENT_SPEAKS, Envelope, Message
from kvferry.common.protocol.wire import decode, encode
from kvferry.common.transport.client_links import ClientLinks
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.options import SocketOptions
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.poll_watcher import PollWatcher
from kvferry.common.transport.waker import (
    Inbox,
    Wakeup,
)

TICK_S = 0.05
MAX_RECEIVED_PER_TURN = 5000
"""Messages taken in before the clock is looked at again."""
ENGINE_STOP_S = 20.0
FAILED_ENGINE_STOP_S = 1.0
"""When the engine failed or is stuck, or a rank is gone that it waits for: nothing it may still do is worth more."""


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a shell is put together from."""

    incarnation: Incarnation
    context: TransportContext
    bind: str
    allow_remote: bool
    make_core: Callable[[], NodeCore]
    """Called once, on the control thread, when all endpoints are known."""
    engine: Callable[[Callable[[Event], None]], EngineThread]
    kv: Callable[[Callable[[Event], None]], KvMover]
    limits: Limits
    timers: Timers
    clock: Clock
    log: logging.Logger


class NodeShell:
    """One node's control thread. `run` in a thread of the caller's; `drain` and `stop` from any thread or signal."""

    def __init__(self, parts: NodeParts) -> None:
        self._parts = parts
        self._log = parts.log
        self._journal = Journal(parts.log)
        self._wakeup = Wakeup()
        self._inbox: Inbox[Event | Callable[[], None]] = Inbox(self._wakeup)
        self._loop = PollLoop()
        self._socket = NodeSocket(parts.context, SocketOptions.control(parts.limits, parts.timers))
        self._links = ClientLinks(
            parts.context,
            parts.incarnation,
            parts.limits,
            parts.timers,
            PollWatcher(self._loop, self._inbox.put),
            self._take,
            parts.log,
        )
        self._engine = parts.engine(self._inbox.put)
        self._kv = parts.kv(self._inbox.put)
        self._core: NodeCore | None = None
        self._exit: ExitProcess | None = None
        self._bound = threading.Event()
        self.endpoint = ""
        self.kv_endpoint = ""
        self.staging_address = ""
        self.malformed = 0
        """Messages dropped since they broke the protocol."""
        self.computes_on = False
        """After `run`: the engine's thread did not end in time. Whoever ends the process must not wait for it."""

    # -- from other threads

    def drain(self) -> None:
        """Finish what is there, then end."""
        self._inbox.put(DrainRequested())

    def stop(self, reason: str = "stopped") -> None:
        """End now, whatever is in flight."""
        self._inbox.put(lambda: self._perform(ExitProcess(reason, 0)))

    def wait_bound(self, timeout_s: float) -> bool:
        """Wait until the endpoints are known (or the thread has ended)."""
        return self._bound.wait(timeout_s)

    def call(self, function: Callable[[NodeCore], None]) -> None:
        """Let a function see the core, on its own thread (checks of invariants)."""
        self._inbox.put(lambda: function(self.core))

    @property
    def core(self) -> NodeCore:
        """The node's decisions; to be touched on the control thread only."""
        if self._core is None:
            raise InvariantError("the node has not been started")
        return self._core

    # -- the control thread

    def run(self) -> ExitProcess:
        """Serve until the core says exit. Raises ConfigError when an endpoint cannot be bound."""
        try:
            self._open()
            self._bound.set()
            self._serve()
        finally:
            self._bound.set()
            self._close()
        assert self._exit is not None
        return self._exit

    def _open(self) -> None:
        self._wakeup.open()
        self._loop.add(self._wakeup, self._drain_inbox)
        self.endpoint = self._socket.bind(self._parts.bind, allow_remote=self._parts.allow_remote)
        self._loop.add(self._socket, self._drain_socket)
        self.kv_endpoint, self.staging_address = self._kv.start(), self._kv.staging_address
        self._core = self._parts.make_core()
        self._engine.start()

    def _serve(self) -> None:
        next_tick = self._parts.clock.now()
        while self._exit is None:
            self._loop.run_once(max(0.0, next_tick - self._parts.clock.now()))
            now = self._parts.clock.now()
            if now >= next_tick:
                self._drain_socket()
                self._drain_inbox()
                self._take(Tick())
                self._socket.flush()
                self._links.flush()
                next_tick = now + TICK_S

    def _close(self) -> None:
        failed = self._exit is None or self._exit.code != 0
        self.computes_on = not self._engine.stop(FAILED_ENGINE_STOP_S if failed else ENGINE_STOP_S)
        self._kv.close()
        self._links.close_all()
        self._loop.remove(self._wakeup)
        self._socket.close()
        self._wakeup.close()

    def _drain_socket(self) -> None:
        received = 0
        while received < MAX_RECEIVED_PER_TURN:
            batch = 0
            for peer, frames in self._socket.receive():
                batch += 1
                try:
                    envelope = decode(frames, self._parts.limits)
                except ProtocolError as error:
                    self._refuse(peer, error)
                    continue
                if envelope.sender == peer:
                    self._take(Received(envelope))
                else:
                    self._refuse(peer, ProtocolError("the header names another sender than the connection"))
            if batch == 0:
                return
            received += batch

    def _refuse(self, peer: Incarnation, error: ProtocolError) -> None:
        """A flood of nonsense must not become a flood of log lines."""
        self.malformed += 1
        if self.malformed & (self.malformed - 1) == 0:
            self._log.warning("dropped message %d that breaks the protocol, from %s: %s", self.malformed, peer, error)

    def _drain_inbox(self) -> None:
        for item in self._inbox.take_all():
            if callable(item):
                item()
            else:
                self._take(item)

    def _take(self, event: Event) -> None:
        if isinstance(event, Received):
            self._journal.received(event.envelope.sender, event.envelope.message)
        for action in self.core.handle(event, self._parts.clock.now()):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Send(peer, message):
                self._send(peer, message)
            case RunStep(plan):
                self._engine.submit(plan)
            case SendPiece(_, piece, block_table, slots):
                self._kv.send(piece, block_table, slots)
            case StopPieces(key):
                self._kv.stop(key)
            case ExpectPieces(key, block_table, first_token, slots):
                self._kv.expect(key, block_table, first_token, slots)
            case ForgetPieces(key):
                self._kv.forget(key)
            case OpenKv(peer, endpoints, staging):
                self._kv.open(peer, *endpoints, staging=staging)
            case CloseKv(peer):
                self._kv.close_peer(peer)
            case CloseSession(peer):
                self._kv.close_session(peer)
            case SendHello(endpoint, message):
                self._links.send_unaddressed(endpoint, message)
            case OpenLink(endpoint):
                self._links.open(endpoint)
            case CloseLink(endpoint):
                self._links.close(endpoint)
            case ResetLink(endpoint):
                self._links.reset(endpoint)
            case BindPeer(endpoint, peer):
                self._links.bind_peer(endpoint, peer)
            case Probe(endpoint):
                self._links.probe(endpoint)
            case ExitProcess():
                self._exit = self._exit or action

    def _send(self, peer: Incarnation, message: Message) -> None:
        self._journal.sent(peer, message)
        if isinstance(message, CLIENT_SPEAKS):
            self._links.send(peer, message)
            return
        try:
            frames = encode(Envelope(self._parts.incarnation, peer, message), self._parts.limits)
        except ProtocolError as error:
            self._log.error("a %s was not sent: %s", type(message).__name__, error)
            return
        self._socket.send(peer, frames)
