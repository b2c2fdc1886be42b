"""The mover: Piece and Credit messages over ZeroMQ, and the `zmq` transport, which sends the bytes in the messages.

Works on every host and device. With a one-sided transport the bytes go through staging slots, and the Piece message
names the slot. Owns one thread and the KV sockets; control and KV share no connection. The thread reads blocks, sends,
receives and writes; callers only queue commands.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvferry.common.base.clock import Clock, MonotonicClock
from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.events import KvFailed, KvSendFailed, PiecesStopped, SessionClosed
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv_transfer.expectations import Expectations
from kvferry.common.kv_transfer.interface import BlockBytes, KvEnd, KvTransport, Post
from kvferry.common.kv_transfer.send_queue import Window
from kvferry.common.kv_transfer.staging import NoSlotMemory, NoSlotWriter, SlotMemory, SlotWriter
from kvferry.common.kv_transfer.zmq_receiver import ZmqReceiver
from kvferry.common.kv_transfer.zmq_sender import ZmqSender
from kvferry.common.protocol.messages import Piece
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.monitor import LinkMonitor
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.options import DEFAULT_TIMERS, SocketOptions
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.waker import Inbox, Waker

_LOG = logging.getLogger("kvferry.kv")
WINDOW = Window(num_bytes=16_777_216, num_pieces=32, stall_s=5.0)
"""The default; `window_for` adapts it to the timers."""
CREDIT_RETRY_S = 0.02
"""Interval between attempts to send credits to a peer whose socket is full."""

TRANSPORT = KvTransport(name="zmq")


def window_for(timers: Timers) -> Window:
    """The window, with a `stall_s` after which a live receiver has closed a broken connection itself."""
    silence_s = timers.link_timeout_s + 2 * timers.link_heartbeat_s
    return replace(WINDOW, stall_s=max(WINDOW.stall_s, silence_s))


class ZmqKvMover:
    """A `KvMover` over ZeroMQ. No method but `close` blocks; `forget` waits for one write at most."""

    def __init__(
        self,
        context: TransportContext,
        self_id: Incarnation,
        bind: str,
        cache: BlockBytes,
        limits: Limits,
        post: Post,
        *,
        allow_remote: bool = False,
        checksum: bool = False,
        activate: Callable[[], None] = lambda: None,
        window: Window | None = None,
        memory: SlotMemory | None = None,
        writer: SlotWriter | None = None,
        clock: Clock | None = None,
        timers: Timers = DEFAULT_TIMERS,
    ) -> None:
        """`activate` binds the KV thread to the device of `cache`. `memory`: staging slots for peers; `writer`: writes
        into the slots of peers; None: no slots. `window`: None for `window_for(timers)`."""
        self._context = context
        self._self_id = self_id
        self._bind = bind
        self._allow_remote = allow_remote
        self._activate = activate
        self._post = post
        self._clock = clock or MonotonicClock()
        # High-water marks above the window, so that the window is the limit, not the socket.
        window = window or window_for(timers)
        high_water = 2 * window.num_pieces
        self._link_options = SocketOptions.kv(limits, high_water, timers, stall_s=window.stall_s)
        self._wakeup = Waker()
        self._inbox: Inbox[Callable[[], None]] = Inbox(self._wakeup)
        self._loop = PollLoop()
        self._socket = NodeSocket(context, SocketOptions.kv(limits, high_water, timers))
        self._expectations = Expectations(cache)
        end = KvEnd(self_id, limits, self._clock, post)
        self._memory: SlotMemory = memory or NoSlotMemory()
        self._receiver = ZmqReceiver(end, self._socket, self._expectations, self._memory)
        self._sender = ZmqSender(
            end, cache, writer or NoSlotWriter(), self._loop, self._make_link, window, checksum=checksum
        )
        self._staging_place = ""
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._ended = False

    def start(self) -> str:
        """See KvMover; the endpoint has the real port."""
        if self._thread is not None:
            raise InvariantError("the mover was started already")
        self._context.prepare_zero_copy()
        bound = self._socket.bind(self._bind, allow_remote=self._allow_remote)
        self._staging_place = self._memory.open()
        self._wakeup.open()
        self._thread = threading.Thread(target=self._run, name="kv", daemon=True)
        self._thread.start()
        return bound

    @property
    def staging_address(self) -> str:
        return self._staging_place

    def open(self, peer: Incarnation, *endpoints: str, staging: str = "") -> None:
        """See KvMover. With a number of endpoints other than one nothing can be sent."""
        if len(endpoints) == 1:
            self._inbox.put(partial(self._sender.open, peer, endpoints[0], staging))

    def close_peer(self, peer: Incarnation) -> None:
        self._inbox.put(partial(self._sender.close_peer, peer))

    def send(self, piece: Piece, block_table: tuple[int, ...], slots: tuple[int, ...] = ()) -> None:
        if self._ended:
            self._post(KvSendFailed(piece.key, "the KV thread has ended"))
            return
        self._inbox.put(partial(self._sender.send, piece, block_table, slots))

    def stop(self, key: TransferKey) -> None:
        if self._ended:
            self._post(PiecesStopped(key))
            return
        self._inbox.put(partial(self._sender.stop, key))

    def expect(
        self, key: TransferKey, block_table: tuple[int, ...], first_token: int = 0, slots: tuple[int, ...] = ()
    ) -> None:
        self._expectations.expect(key, block_table, first_token, slots)

    def forget(self, key: TransferKey) -> None:
        self._expectations.forget(key)

    def close_session(self, peer: Incarnation) -> None:
        self._inbox.put(partial(self._close_session, peer))

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """(sent, received): see ZmqSender.counts and ZmqReceiver.counts. A copy, possibly slightly out of date."""
        return self._sender.counts.copy(), self._receiver.counts.copy()

    def close(self) -> None:
        """See KvMover. Idempotent."""
        self._stopping = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._socket.close()
        self._memory.close()
        self._wakeup.close()

    def check_invariants(self) -> None:
        """Raise InvariantError on inconsistent state. Only while the thread is idle or has ended."""
        self._sender.check_invariants()
        self._socket.check_invariants()

    def _make_link(self) -> tuple[LinkSocket, LinkMonitor]:
        link = LinkSocket(self._context, self._self_id, self._link_options)
        return link, LinkMonitor(self._context, link)

    def _run(self) -> None:
        try:
            self._activate()
            self._loop.add(self._wakeup, self._take_commands)
            self._loop.add(self._socket, self._receiver.receive)
            more = False
            while not self._stopping:
                self._loop.run_once(0.0 if more else self._timeout_s())
                more = self._sender.pump()
                self._sender.reset_stalled()
                if self._socket.has_pending:
                    self._socket.flush()
        except Exception as error:  # noqa: BLE001  after any exception no KV moves: the process must end
            _LOG.critical("the KV thread failed", exc_info=error)
            self._post(KvFailed(f"{type(error).__name__}: {error}"))
        finally:
            # Also after an exception: peers see closed connections, and callers get an immediate failure.
            self._ended = True
            self._sender.close()
            self._socket.close()

    def _close_session(self, peer: Incarnation) -> None:
        if self._memory.refuse(peer):
            self._post(SessionClosed(peer))

    def _take_commands(self) -> None:
        for command in self._inbox.take_all():
            command()

    def _timeout_s(self) -> float | None:
        if self._socket.has_pending:
            return CREDIT_RETRY_S
        deadline = self._sender.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock.now())
