"""Rank 0's side of a tensor-parallel node: starts the other ranks, tells them what to do, and ends with them.

A thread of its own owns the socket to them and watches their processes. One rank's end is the end of all: what is left
of a model cannot compute. So when one ends unasked, the others are killed at once, which also ends every wait of this
process for them, and the node hears of it as of a failed engine. The kernel ends the ranks when this process ends.
"""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from kvferry.common.base.errors import (
    InvariantError,
    KvferryError,
)
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.events import (
    KvSendFailed,
    PieceArrived,
    PieceBad,
    PieceSent,
    PiecesStopped,
)
from kvferry.common.device.base import Device
from kvferry.common.kv_transfer.interface import KvEvent
from kvferry.common.parallel.collectives import GroupCollectives
from kvferry.common.parallel.group import TCPStore, meet, open_store
from kvferry.common.parallel.shard import Shard
from kvferry.common.ranks import messages
from kvferry.common.ranks.child import RankProcess, start_rank
from kvferry.common.ranks.messages import (
    Begin,
    Done,
    FromRank,
    Loaded,
    Quit,
    RankFailed,
    RankSpec,
    Ready,
    RunPlan,
    ToRank,
)
from kvferry.common.scheduling.step import StepBatch
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.nonblocking import SendResult
from kvferry.common.transport.options import RANK_OPTIONS
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.waker import (
    Inbox,
    Waker,
)

START_TIMEOUT_S = 600.0
"""Until a rank has loaded its part: the largest models take minutes."""
QUIT_TIMEOUT_S = 5.0
FLUSH_S = 0.01
ENDING_S = 0.05
"""Between a process's connections and its end when it is killed; long enough nearly always."""
_BIND = "tcp://127.0.0.1:*"


class RankLostError(KvferryError):
    """A rank ended, or did not answer in time."""


class TeamListener(Protocol):
    """Who hears what ranks say, on the team's thread."""

    def on_rank_event(self, rank: int, event: KvEvent) -> None:
        """What became of a rank's part of a piece."""
        ...

    def on_team_lost(self, reason: str) -> None:
        """A rank is gone; comes once."""
        ...


class RankTeam:
    """The other ranks of this process's node. `start`, `wait_loaded`, `begin`, ..., `close`; used by any thread."""

    def __init__(self, spec: RankSpec, log: logging.Logger) -> None:
        """`spec`: what all ranks have in common."""
        self.collectives = GroupCollectives(Shard(0, spec.size))
        self.kv_endpoints: tuple[str, ...] = ()
        """Those of the ranks from 1 on."""
        self._spec = spec
        self._log = log
        # Of its own, without keys: what goes between the processes of one node stays on loopback, like the group's.
        self._context = TransportContext()
        self._socket = NodeSocket(self._context, RANK_OPTIONS)
        self._loop = PollLoop()
        self._wakeup = Waker()
        self._inbox: Inbox[tuple[int | None, ToRank]] = Inbox(self._wakeup)
        self._store: TCPStore | None = open_store()
        self._children: dict[Incarnation, RankProcess] = {}
        self._listener: TeamListener | None = None
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._changed = threading.Condition()
        self._said: dict[type, dict[int, FromRank]] = {Loaded: {}, Ready: {}}
        self._calls = 0
        self._done: dict[int, int] = {}
        """Rank -> the last call that it has carried out."""
        self._lost = ""
        self._closing = False

    # -- life

    def start(self) -> None:
        """Start the processes. Called by the main thread: on Linux they live as long as the thread that starts them."""
        self._wakeup.open()
        self._loop.add(self._wakeup, self._send_all)
        lead = self._socket.bind(_BIND)
        self._loop.add(self._socket, self._receive)
        assert self._store is not None
        for rank in range(1, self._spec.size):
            child = start_rank(self._spec, rank, lead, self._store.port)
            self._children[child.self_id] = child
            self._loop.add(child, lambda child=child: self._on_end(child))  # type: ignore[misc]
        self._thread.start()

    def wait_loaded(self) -> int:
        """Wait until every rank has its part of the model; the least free bytes of their devices.

        RankLostError when one cannot load it.
        """
        self._wait(lambda: len(self._said[Loaded]) == len(self._children), START_TIMEOUT_S, "to load the model")
        return min(said.free_bytes for said in self._said[Loaded].values() if isinstance(said, Loaded))

    def begin(self, incarnation: Incarnation, num_blocks: int, device: Device, num_host_blocks: int = 0) -> None:
        """Let all ranks make their caches, meet them, and wait until they are ready."""
        timeout = timedelta(seconds=self._spec.timers.engine_stall_exit_s)
        self.tell(Begin(incarnation, num_blocks, num_host_blocks))
        assert self._store is not None
        try:
            meet(self.collectives, device, self._store, timeout)
        except RuntimeError as error:
            raise RankLostError(self._lost or f"the ranks did not meet: {error}") from None
        self._wait(lambda: len(self._said[Ready]) == len(self._children), START_TIMEOUT_S, "to be ready")
        ready = sorted(self._said[Ready].items())
        self.kv_endpoints = tuple(said.kv_endpoint for _, said in ready if isinstance(said, Ready))

    def listen(self, listener: TeamListener) -> None:
        """Who hears what the ranks say from here on."""
        with self._changed:
            self._listener = listener
            lost = self._lost
        if lost:
            listener.on_team_lost(lost)

    def close(self) -> None:
        """End all ranks, in order if they do that soon. Twice does no harm."""
        with self._changed:
            self._closing = True
            began = len(self._said[Ready]) == len(self._children)
        self.tell(Quit())
        for child in self._children.values():
            if not (began and child.ends_within(QUIT_TIMEOUT_S)):
                child.kill()
                child.wait()
        self._wakeup.set()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        for child in self._children.values():
            child.close()
        self._children.clear()
        self._wakeup.close()
        self._context.close()
        self.collectives.disconnect()
        self._store = None

    # -- what is told

    @property
    def size(self) -> int:
        """How many ranks there are, rank 0 among them."""
        return self._spec.size

    def pass_on(self, plan: StepBatch) -> None:
        """Let every rank compute its part of a step."""
        self.tell(RunPlan(plan))

    def tell(self, message: ToRank, rank: int | None = None) -> None:
        """Tell one rank, or all, without waiting. What is told is done in the order in which it was told."""
        self._inbox.put((rank, message))

    def call(self, make: Callable[[int], ToRank]) -> None:
        """Tell all ranks and wait until each has done it. `make` gets the number that Done will have.

        Comes back at once when the team is lost: then nothing is done any more. A rank that does not answer is lost.
        """
        with self._changed:
            self._calls += 1
            call = self._calls
            self._inbox.put((None, make(call)))
        others = range(1, self.size)
        try:
            self._wait(
                lambda: all(self._done.get(rank, 0) >= call for rank in others),
                self._spec.timers.engine_stall_exit_s,
                "to do what it was told",
            )
        except RankLostError as error:
            self._lose(str(error))

    # -- the thread

    def _run(self) -> None:
        while not self._ended():
            self._loop.run_once(FLUSH_S if self._socket.has_pending else None)
            self._socket.flush()
        self._socket.close()

    def _ended(self) -> bool:
        with self._changed:
            return self._closing and all(child.has_ended for child in self._children.values())

    def _send_all(self) -> None:
        for rank, message in self._inbox.take_all():
            for child in self._children.values():
                if rank in (None, child.rank):
                    sent = self._socket.send(child.self_id, child.outgoing.frames(message))
                    if sent is SendResult.UNREACHABLE:
                        self._lose(f"rank {child.rank} cannot be reached")

    def _receive(self) -> None:
        for peer, frames in self._socket.receive():
            child = self._children.get(peer)
            if child is not None:
                try:
                    self._take(child, child.incoming.message(frames))
                except InvariantError as error:
                    self._lose(f"rank {child.rank}: {error}")

    def _take(self, child: RankProcess, message: FromRank) -> None:
        event = _event(message)
        if event is not None:
            if self._listener is not None:
                self._listener.on_rank_event(child.rank, event)
            return
        if isinstance(message, RankFailed):
            # It may have failed because another one is ending, which is what somebody wants to read.
            for other in self._children.values():
                if other is not child and other.ends_within(ENDING_S):
                    self._on_end(other)
            self._lose(f"rank {child.rank}: {message.reason}")
            return
        with self._changed:
            if isinstance(message, Done):
                self._done[child.rank] = message.call
            else:
                self._said[type(message)][child.rank] = message
            self._changed.notify_all()

    def _on_end(self, child: RankProcess) -> None:
        self._loop.remove(child)  # twice does no harm
        self._lose(child.wait())

    def _lose(self, reason: str) -> None:
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

    # -- inside

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._lost) or condition(), timeout_s):
                raise RankLostError(f"a rank took longer than {timeout_s:g} s {what}")
            if self._lost:
                raise RankLostError(self._lost)


def _event(message: FromRank) -> KvEvent | None:
    """What a rank says of pieces, as its own mover said it there."""
    match message:
        case messages.Sent(key, number):
            return PieceSent(key, number)
        case messages.Stopped(key):
            return PiecesStopped(key)
        case messages.SendFailed(key, reason):
            return KvSendFailed(key, reason)
        case messages.Arrived(header):
            return PieceArrived(header.piece())
        case messages.Bad(key, number, reason):
            return PieceBad(key, number, reason)
    return None
