"""Rank 0's side of a tensor-parallel node: starts the other ranks, exchanges messages with them, and ends with them.

A thread owns the socket to the ranks and watches their processes. Losing one rank loses the team, because an incomplete
set of ranks cannot compute: the others are killed immediately, which also ends every wait of this process for them, and
the listener is notified. The kernel ends the ranks when this process ends.
"""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar, assert_never

from kvferry.common.base.errors import InvariantError, KvferryError
from kvferry.common.base.ids import Incarnation
from kvferry.common.device.base import Device
from kvferry.common.kv_transfer.interface import KvEvent
from kvferry.common.parallel.collectives import GroupCollectives
from kvferry.common.parallel.group import TCPStore, open_store, rendezvous
from kvferry.common.parallel.shard import Shard
from kvferry.common.ranks.child import RankProcess, start_rank
from kvferry.common.ranks.link import FLUSH_INTERVAL_S, event_of
from kvferry.common.ranks.messages import (
    Arrived,
    Bad,
    ComputeStep,
    Done,
    FromRank,
    Initialize,
    Loaded,
    Quit,
    RankFailed,
    RankSpec,
    Ready,
    SendFailed,
    Sent,
    Stopped,
    ToRank,
)
from kvferry.common.scheduling.step import StepBatch
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.nonblocking import SendResult
from kvferry.common.transport.options import RANK_OPTIONS
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.waker import Inbox, Waker

_RANK_START_TIMEOUT_S = 600.0
"""For loading the model, and for Initialize: the largest models take minutes to load."""
_QUIT_TIMEOUT_S = 5.0
_FIRST_DEATH_WAIT_S = 0.05
"""A killed process loses its connections before it ends; this bounds nearly always the time in between."""
_BIND = "tcp://127.0.0.1:*"
T = TypeVar("T")


class RankLostError(KvferryError):
    """A rank ended, or did not answer in time."""


class TeamListener(Protocol):
    """Receives the events of the ranks, on the team's thread."""

    def on_rank_event(self, rank: int, event: KvEvent) -> None:
        """Handle an event of a rank's KV mover."""
        ...

    def on_team_lost(self, reason: str) -> None:
        """Handle the loss of a rank; called once."""
        ...


class RankTeam:
    """The other ranks of this process's node: `start`, `wait_loaded`, `initialize`, ..., `close`. Thread-safe."""

    def __init__(self, spec: RankSpec, log: logging.Logger) -> None:
        """`spec`: the fields that all ranks have in common."""
        self.collectives = GroupCollectives(Shard(0, spec.size))
        self.kv_endpoints: tuple[str, ...] = ()
        """Of the ranks from 1 on, once initialized."""
        self._spec = spec
        self._log = log
        # A context without keys: messages between the processes of one node stay on loopback, as collectives do.
        self._context = TransportContext()
        self._socket = NodeSocket(self._context, RANK_OPTIONS)
        self._loop = PollLoop()
        self._waker = Waker()
        self._inbox: Inbox[tuple[int | None, ToRank]] = Inbox(self._waker)
        """(rank, or None for all; message)."""
        self._store: TCPStore | None = open_store()
        self._children: dict[Incarnation, RankProcess] = {}
        self._listener: TeamListener | None = None
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._changed = threading.Condition()
        """Guards and announces changes of everything below."""
        self._loaded: dict[int, Loaded] = {}
        self._ready: dict[int, Ready] = {}
        self._last_call = 0
        self._done: dict[int, int] = {}
        """Rank -> the last call that it has carried out."""
        self._lost = ""
        """Why the team is lost; empty while it is not."""
        self._closing = False

    # -- start and end

    def start(self) -> None:
        """Start the processes. Must be called by the main thread: Linux ends them with the thread that started them."""
        self._waker.open()
        self._loop.add(self._waker, self._send_queued)
        lead_endpoint = self._socket.bind(_BIND)
        self._loop.add(self._socket, self._receive)
        assert self._store is not None
        for rank in range(1, self._spec.size):
            child = start_rank(self._spec, rank, lead_endpoint, self._store.port)
            self._children[child.self_id] = child
            self._loop.add(child, lambda child=child: self._on_end(child))  # type: ignore[misc]
        self._thread.start()

    def wait_loaded(self) -> int:
        """Wait until every rank has loaded its part of the model; returns the least free bytes of their devices.

        Raises RankLostError when a rank cannot load it.
        """
        self._wait(lambda: len(self._loaded) == len(self._children), _RANK_START_TIMEOUT_S, "to load the model")
        return min(loaded.free_bytes for loaded in self._loaded.values())

    def initialize(self, incarnation: Incarnation, num_blocks: int, device: Device, num_host_blocks: int = 0) -> None:
        """Have all ranks allocate their caches, join the rendezvous with them, and wait until they are ready.

        Raises RankLostError when a rank is lost or late.
        """
        timeout = timedelta(seconds=self._spec.timers.engine_stall_exit_s)
        self.send(Initialize(incarnation, num_blocks, num_host_blocks))
        assert self._store is not None
        try:
            rendezvous(self.collectives, device, self._store, timeout)
        except RuntimeError as error:
            raise RankLostError(self._lost or f"the rendezvous of the ranks failed: {error}") from None
        self._wait(lambda: len(self._ready) == len(self._children), _RANK_START_TIMEOUT_S, "to initialize")
        self.kv_endpoints = tuple(ready.kv_endpoint for _, ready in sorted(self._ready.items()))

    def set_listener(self, listener: TeamListener) -> None:
        """Notify `listener` from now on, and immediately if the team is already lost."""
        with self._changed:
            self._listener = listener
            lost = self._lost
        if lost:
            listener.on_team_lost(lost)

    def close(self) -> None:
        """End all ranks, in order if they do so in time. May be called twice."""
        with self._changed:
            self._closing = True
            initialized = len(self._ready) == len(self._children)
        self.send(Quit())
        for child in self._children.values():
            if not (initialized and child.ends_within(_QUIT_TIMEOUT_S)):
                child.kill()
                child.wait()
        self._waker.set()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        for child in self._children.values():
            child.close()
        self._children.clear()
        self._waker.close()
        self._context.close()
        self.collectives.disconnect()
        self._store = None

    # -- requests to the ranks

    @property
    def size(self) -> int:
        """Number of ranks, including rank 0."""
        return self._spec.size

    def broadcast_step(self, batch: StepBatch) -> None:
        """Have every other rank compute its part of a step."""
        self.send(ComputeStep(batch))

    def send(self, message: ToRank, rank: int | None = None) -> None:
        """Queue a message to one rank, or to all, without waiting. A rank processes its messages in FIFO order."""
        self._inbox.put((rank, message))

    def call(self, make: Callable[[int], ToRank]) -> None:
        """Send a message to all ranks and wait until each has answered Done. `make` gets the call's number.

        A rank that does not answer in time is lost. Returns without waiting when the team is lost.
        """
        with self._changed:
            self._last_call += 1
            call = self._last_call
            self._inbox.put((None, make(call)))
        others = range(1, self.size)
        try:
            self._wait(
                lambda: all(self._done.get(rank, 0) >= call for rank in others),
                self._spec.timers.engine_stall_exit_s,
                "to carry out a call",
            )
        except RankLostError as error:
            self._lose(str(error))

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._lost) or condition(), timeout_s):
                raise RankLostError(f"a rank took longer than {timeout_s:g} s {what}")
            if self._lost:
                raise RankLostError(self._lost)

    # -- the team's thread

    def _run(self) -> None:
        while not self._has_ended():
            self._loop.run_once(FLUSH_INTERVAL_S if self._socket.has_pending else None)
            self._socket.flush()
        self._socket.close()

    def _has_ended(self) -> bool:
        with self._changed:
            return self._closing and all(child.has_ended for child in self._children.values())

    def _send_queued(self) -> None:
        for rank, message in self._inbox.take_all():
            for child in self._children.values():
                if rank in (None, child.rank):
                    sent = self._socket.send(child.self_id, child.outbound.frames(message))
                    if sent is SendResult.UNREACHABLE:
                        self._lose(f"rank {child.rank} cannot be reached")

    def _receive(self) -> None:
        for peer, frames in self._socket.receive():
            child = self._children.get(peer)
            if child is not None:
                try:
                    self._handle(child, child.inbound.message(frames))
                except InvariantError as error:
                    self._lose(f"rank {child.rank}: {error}")

    def _handle(self, child: RankProcess, message: FromRank) -> None:
        match message:
            case Sent() | Stopped() | SendFailed() | Arrived() | Bad():
                if self._listener is not None:
                    self._listener.on_rank_event(child.rank, event_of(message))
            case RankFailed(reason):
                self._on_failed(child, reason)
            case Loaded():
                self._note(self._loaded, child, message)
            case Ready():
                self._note(self._ready, child, message)
            case Done(call):
                self._note(self._done, child, call)
            case _:
                assert_never(message)

    def _note(self, table: dict[int, T], child: RankProcess, value: T) -> None:
        with self._changed:
            table[child.rank] = value
            self._changed.notify_all()

    def _on_failed(self, child: RankProcess, reason: str) -> None:
        # It may have failed because another rank is ending: then that end is the cause to report.
        for other in self._children.values():
            if other is not child and other.ends_within(_FIRST_DEATH_WAIT_S):
                self._on_end(other)
        self._lose(f"rank {child.rank}: {reason}")

    def _on_end(self, child: RankProcess) -> None:
        self._loop.remove(child)  # may already be removed
        self._lose(child.wait())

    def _lose(self, reason: str) -> None:
        """Kill all ranks and notify the listener, for the first reason only. Called by any thread."""
        with self._changed:
            if self._closing or self._lost:
                return
            self._lost = reason
            self._changed.notify_all()
            listener = self._listener
        self._log.critical("%s: the node ends", reason)
        for child in self._children.values():
            child.kill()
        if listener is not None:
            listener.on_team_lost(reason)
