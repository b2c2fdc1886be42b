"""The announcement proxy of a router host: forwards each node's announcement to every worker of the host. Stateless.

It runs as a child process of its own (`run_proxy`), so that no worker is special. Tests run an AnnouncementProxy in a
thread.
"""

import os
import signal
from collections.abc import Callable

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.transport import nonblocking, options
from kvferry.common.transport.announce import ANNOUNCE_OPTIONS, MEMBERS_OPTIONS
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.nonblocking import RECEIVE_BATCH
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.security import Security
from kvferry.common.transport.waker import Waker

PARENT_CHECK_S = 0.5
"""The interval at which the proxy checks whether its parent is alive."""


class _Side:
    """One bound socket of the proxy."""

    def __init__(self, poll_handle: "zmq.Socket[bytes]") -> None:
        self.poll_handle = poll_handle


class AnnouncementProxy:
    """XSUB towards the nodes, XPUB towards the workers. `bind` and `run` on one thread; `stop` from any thread."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._waker = Waker()
        self._stopping = False
        self._nodes: _Side | None = None
        self._workers: _Side | None = None

    def bind(self, nodes_endpoint: str, workers_endpoint: str, *, allow_remote: bool = False) -> tuple[str, str]:
        """Bind both sides, and return their endpoints with the real ports. Only the nodes' side may be remote."""
        self._waker.open()
        self._nodes = _Side(self._context.open_socket(zmq.XSUB, "announcement proxy, nodes"))
        self._workers = _Side(self._context.open_socket(zmq.XPUB, "announcement proxy, workers"))
        nodes, workers = self._nodes.poll_handle, self._workers.poll_handle
        options.apply(nodes, ANNOUNCE_OPTIONS)
        options.apply(workers, MEMBERS_OPTIONS)
        return (
            options.bind(self._context, nodes, nodes_endpoint, ANNOUNCE_OPTIONS, allow_remote=allow_remote),
            options.bind(self._context, workers, workers_endpoint, MEMBERS_OPTIONS, allow_remote=False),
        )

    def run(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Forward until `stop`, or until `is_wanted`, called every PARENT_CHECK_S, returns False."""
        if self._nodes is None or self._workers is None:
            raise InvariantError("the proxy is not bound")
        nodes, workers = self._nodes.poll_handle, self._workers.poll_handle
        loop = PollLoop()
        loop.add(self._waker, self._waker.clear)
        loop.add(self._nodes, lambda: _forward(nodes, workers))
        loop.add(self._workers, lambda: _forward(workers, nodes))
        while not self._stopping and is_wanted():
            loop.run_once(PARENT_CHECK_S)

    def stop(self) -> None:
        """Make `run` return. May be called from any thread and from a signal handler."""
        self._stopping = True
        self._waker.set()

    def close(self) -> None:
        """Close both sides, after `run` has returned. May be called twice."""
        for side in (self._nodes, self._workers):
            if side is not None:
                self._context.close_socket(side.poll_handle)
        self._nodes = self._workers = None
        self._waker.close()


def _forward(source: "zmq.Socket[bytes]", target: "zmq.Socket[bytes]") -> None:
    """Forward announcements (or, the other way, subscriptions). What a full side does not accept is lost; nodes repeat
    their announcements."""
    for frames in nonblocking.receive(source, RECEIVE_BATCH):
        nonblocking.send(target, frames)


def run_proxy(
    nodes_endpoint: str,
    workers_endpoint: str,
    *,
    allow_remote: bool = False,
    security: Security | None = None,
    on_bound: Callable[[str, str], None] = lambda nodes, workers: None,
) -> None:
    """Run the proxy: the main function of a child process. Returns at SIGTERM or SIGINT, or when the parent dies.

    `on_bound` receives the endpoints with their real ports. ConfigError when they cannot be bound.
    """
    parent = os.getppid()
    context = TransportContext(security)
    proxy = AnnouncementProxy(context)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: proxy.stop())
    try:
        on_bound(*proxy.bind(nodes_endpoint, workers_endpoint, allow_remote=allow_remote))
        proxy.run(lambda: os.getppid() == parent)
    finally:
        proxy.close()
        context.close()
