"""The proxy of a router host: hands every node's announcement to every worker here. Decides and remembers nothing.

It is its own child process (`run_proxy`), so that no worker is special; tests run an AnnouncementProxy in a thread.
"""

import os
import signal
from collections.abc import Callable

import zmq

from kvferry.common.base.errors import InvariantError
from kvferry.common.transport import (
    nonblocking as nowait,
)
from kvferry.common.transport import (
    options,
)
from kvferry.common.transport.announce import ANNOUNCE_OPTIONS, MEMBERS_OPTIONS
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.nonblocking import RECEIVE_BATCH
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.security import Security
from kvferry.common.transport.waker import Wakeup

PARENT_CHECK_S = 0.5
"""How soon the proxy notices that who started it is gone."""


class _Side:
    """One bound socket of the proxy."""

    def __init__(self, poll_handle: "zmq.Socket[bytes]") -> None:
        self.poll_handle = poll_handle


class AnnouncementProxy:
    """XSUB towards the nodes, XPUB towards the workers. `bind`, `run` in the same thread, `stop` from any."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._wakeup = Wakeup()
        self._stopping = False
        self._nodes: _Side | None = None
        self._workers: _Side | None = None

    def bind(self, nodes_endpoint: str, workers_endpoint: str, *, allow_remote: bool = False) -> tuple[str, str]:
        """Bind both sides and return them with their real ports. Only the nodes' side may be remote."""
        self._wakeup.open()
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
        """Forward until `stop`, or until `is_wanted`, asked every PARENT_CHECK_S, says no."""
        if self._nodes is None or self._workers is None:
            raise InvariantError("the proxy is not bound")
        nodes, workers = self._nodes.poll_handle, self._workers.poll_handle
        loop = PollLoop()
        loop.add(self._wakeup, self._wakeup.clear)
        loop.add(self._nodes, lambda: _forward(nodes, workers))
        loop.add(self._workers, lambda: _forward(workers, nodes))
        while not self._stopping and is_wanted():
            loop.run_once(PARENT_CHECK_S)

    def stop(self) -> None:
        """Make `run` return; from any thread or signal handler."""
        self._stopping = True
        self._wakeup.set()

    def close(self) -> None:
        """Close both sides, after `run`. Twice does no harm."""
        for side in (self._nodes, self._workers):
            if side is not None:
                self._context.close_socket(side.poll_handle)
        self._nodes = self._workers = None
        self._wakeup.close()


def _forward(source: "zmq.Socket[bytes]", target: "zmq.Socket[bytes]") -> None:
    """Announcements one way, subscriptions the other. What a full side does not take is lost: it comes again."""
    for frames in nowait.receive(source, RECEIVE_BATCH):
        nowait.send(target, frames)


def run_proxy(
    nodes_endpoint: str,
    workers_endpoint: str,
    *,
    allow_remote: bool = False,
    security: Security | None = None,
    on_bound: Callable[[str, str], None] = lambda nodes, workers: None,
) -> None:
    """Be the proxy: the main function of a child process. Returns at SIGTERM or SIGINT, or when the parent dies.

    `on_bound` is told the endpoints with their real ports. ConfigError when they cannot be bound.
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
