"""The control thread of a node: owns the sockets and the core, performs the core's actions. Decides nothing.

Events of other threads (steps done, pieces sent or written, drain) arrive through one inbox. Each tick comes after all
waiting messages and events have been handled, so that a process that was suspended does not count its own pause as
silence of its peers.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from kvferry.common.base.clock import Clock
from kvferry.common.base.errors import InvariantError, ProtocolError
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
from kvferry.common.cluster.events import DrainRequested, Event, Received, Tick
from kvferry.common.cluster.node_core import NodeCore
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.engine.engine_thread import EngineThread
from kvferry.common.kv_transfer.interface import KvMover
from kvferry.common.node.message_log import MessageLog
from kvferry.common.protocol.messages import CLIENT_SPEAKS, Envelope, Message
from kvferry.common.protocol.wire import decode, encode
from kvferry.common.transport.client_links import ClientLinks
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.options import SocketOptions
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.poll_watcher import PollWatcher
from kvferry.common.transport.waker import Inbox, Waker

NODE_TICK_S = 0.05
_RECEIVE_LIMIT = 5000
"""Messages handled before the clock is read again."""
_ENGINE_JOIN_TIMEOUT_S = 20.0
_FAILED_ENGINE_JOIN_TIMEOUT_S = 1.0
"""After a failure the engine may be stuck, or wait for a lost rank: the rest of its step is not worth waiting for."""


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a shell is composed of."""

    incarnation: Incarnation
    context: TransportContext
    bind: str
    allow_remote: bool
    make_core: Callable[[str, str], NodeCore]
    """(KV endpoint, staging place) -> core. Called once, on the control thread, when all endpoints are bound."""
    make_engine: Callable[[Callable[[Event], None]], EngineThread]
    make_kv: Callable[[Callable[[Event], None]], KvMover]
    limits: Limits
    timers: Timers
    clock: Clock
    log: logging.Logger


class NodeShell:
    """One node's control thread: the thread that calls `run`. `drain`, `stop` and `call` are safe from any thread."""

    def __init__(self, parts: NodeParts) -> None:
        self._parts = parts
        self._log = parts.log
        self._message_log = MessageLog(parts.log)
        self._waker = Waker()
        self._inbox: Inbox[Event | Callable[[], None]] = Inbox(self._waker)
        self._loop = PollLoop()
        self._socket = NodeSocket(parts.context, SocketOptions.control(parts.limits, parts.timers))
        self._links = ClientLinks(
            parts.context,
            parts.incarnation,
            parts.limits,
            parts.timers,
            PollWatcher(self._loop, self._inbox.put),
            self._handle,
            parts.log,
        )
        self._engine = parts.make_engine(self._inbox.put)
        self._kv = parts.make_kv(self._inbox.put)
        self._core: NodeCore | None = None
        self._exit: ExitProcess | None = None
        self._bound = threading.Event()
        self.endpoint = ""
        self.kv_endpoint = ""
        self.staging_address = ""
        self.engine_still_runs = False
        """After `run`: whether the engine thread did not end in time. The process must then end without joining it."""
        self._num_malformed = 0
        """Messages dropped because they violated the protocol."""

    # -- called from any thread

    def drain(self) -> None:
        """Finish the accepted requests, accept no new ones, then end."""
        self._inbox.put(DrainRequested())

    def stop(self, reason: str = "stopped") -> None:
        """End without finishing requests in flight."""
        self._inbox.put(lambda: self._perform(ExitProcess(reason, 0)))

    def wait_bound(self, timeout_s: float) -> bool:
        """Wait until the endpoints are bound, or the thread has ended; returns False on timeout."""
        return self._bound.wait(timeout_s)

    def call(self, function: Callable[[NodeCore], None]) -> None:
        """Call a function with the core on the control thread, for checks of invariants."""
        self._inbox.put(lambda: function(self.core))

    @property
    def core(self) -> NodeCore:
        """The node's core. Must be used on the control thread only."""
        if self._core is None:
            raise InvariantError("the node has not started")
        return self._core

    # -- the control thread

    def run(self) -> ExitProcess:
        """Serve until the core ends the process. Raises ConfigError when an endpoint cannot be bound."""
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
        self._waker.open()
        self._loop.add(self._waker, self._drain_inbox)
        self.endpoint = self._socket.bind(self._parts.bind, allow_remote=self._parts.allow_remote)
        self._loop.add(self._socket, self._drain_socket)
        self.kv_endpoint, self.staging_address = self._kv.start(), self._kv.staging_address
        self._core = self._parts.make_core(self.kv_endpoint, self.staging_address)
        self._engine.start()

    def _serve(self) -> None:
        next_tick = self._parts.clock.now()
        while self._exit is None:
            self._loop.run_once(max(0.0, next_tick - self._parts.clock.now()))
            now = self._parts.clock.now()
            if now >= next_tick:
                self._drain_socket()
                self._drain_inbox()
                self._handle(Tick())
                self._socket.flush()
                self._links.flush()
                next_tick = now + NODE_TICK_S

    def _close(self) -> None:
        failed = self._exit is None or self._exit.code != 0
        self.engine_still_runs = not self._engine.stop(
            _FAILED_ENGINE_JOIN_TIMEOUT_S if failed else _ENGINE_JOIN_TIMEOUT_S
        )
        self._kv.close()
        self._links.close_all()
        self._loop.remove(self._waker)
        self._socket.close()
        self._waker.close()

    def _drain_socket(self) -> None:
        received = 0
        while received < _RECEIVE_LIMIT:
            count = 0
            for peer, frames in self._socket.receive():
                count += 1
                try:
                    envelope = decode(frames, self._parts.limits)
                except ProtocolError as error:
                    self._drop_malformed(peer, error)
                    continue
                if envelope.sender == peer:
                    self._handle(Received(envelope))
                else:
                    self._drop_malformed(peer, ProtocolError("the sender in the header is not the connection's"))
            if count == 0:
                return
            received += count

    def _drop_malformed(self, peer: Incarnation, error: ProtocolError) -> None:
        self._num_malformed += 1
        # Only the 1st, 2nd, 4th, 8th, ... one is logged: a flood of messages must not become a flood of log lines.
        if self._num_malformed & (self._num_malformed - 1) == 0:
            self._log.warning("dropped malformed message %d, from %s: %s", self._num_malformed, peer, error)

    def _drain_inbox(self) -> None:
        for item in self._inbox.take_all():
            if callable(item):
                item()
            else:
                self._handle(item)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Received):
            self._message_log.received(event.envelope.sender, event.envelope.message)
        for action in self.core.handle(event, self._parts.clock.now()):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Send(peer, message):
                self._send(peer, message)
            case RunStep(batch):
                self._engine.submit(batch)
            case SendPiece(piece, block_table, slots):
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
            case _:
                assert_never(action)

    def _send(self, peer: Incarnation, message: Message) -> None:
        self._message_log.sent(peer, message)
        if isinstance(message, CLIENT_SPEAKS):
            self._links.send(peer, message)
            return
        try:
            frames = encode(Envelope(self._parts.incarnation, peer, message), self._parts.limits)
        except ProtocolError as error:
            self._log.error("%s was not sent: %s", type(message).__name__, error)
            return
        self._socket.send(peer, frames)
