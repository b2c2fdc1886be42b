"""Observes the published loads of a running cluster's nodes, as an additional router worker that sends no requests."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvferry.common.base.clock import MonotonicClock
from kvferry.common.cluster.links import LinkState
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import NodeLoad
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.security import Security
from kvferry.router.service import RouterService, ServiceSettings
from tests.support.eventually import PATIENCE_S
from tests.support.serve import wait_until

T = TypeVar("T")


@dataclass(frozen=True)
class NodeView:
    """A node's last Status."""

    state: LinkState
    said: tuple[str, int]
    """(incarnation, number of its Status)."""
    steps_done: int
    work_waiting: bool
    load: NodeLoad

    @property
    def is_idle(self) -> bool:
        """Whether the node has no request, no reservation and no block in use."""
        load = self.load
        quiet = not self.work_waiting and load.waiting_requests == load.running_requests == load.reserved_blocks == 0
        return self.state is LinkState.ALIVE and quiet and load.free_blocks == load.total_blocks


class NodeWatch:
    """Runs a router worker's service on a thread. Use it as a context manager."""

    def __init__(self, announcements: str, security: Security | None = None) -> None:
        self._context = TransportContext(security)
        # Silent nodes must stay listed: the test looks at whether they are suspect. A dead process refuses connections.
        timers = Timers(dead_after_s=PATIENCE_S)
        settings = ServiceSettings("watch", timers, Limits(), announcements=announcements)
        self._service = RouterService(settings, MonotonicClock(), self._context, logging.getLogger("tests.watch"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node-watch", daemon=True)

    def __enter__(self) -> "NodeWatch":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._service.start(), self._loop).result(PATIENCE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._service.stop(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
        self._context.close()

    def views(self) -> dict[str, NodeView]:
        """Node name -> its last Status, for the nodes that have sent one."""
        return self._ask(self._views)

    def wait_idle(self, *names: str, what: str = "every node is idle", deadline_s: float = PATIENCE_S) -> None:
        """Wait until each of these nodes has sent a new Status in which it is idle."""
        before = {name: view.said for name, view in self.views().items()}

        def idle() -> bool:
            views = self.views()
            return all(name in views and views[name].is_idle and views[name].said != before.get(name) for name in names)

        try:
            wait_until(idle, what, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.views()}") from None

    def _views(self) -> dict[str, NodeView]:
        views: dict[str, NodeView] = {}
        # An earlier incarnation has the same name and may still be listed.
        for link in sorted(self._service.core.links.links.values(), key=lambda link: link.last_heard):
            if link.welcome is not None and link.status is not None:
                status = link.status
                said = (str(link.peer), status.status_no)
                views[link.welcome.name] = NodeView(
                    link.state, said, status.steps_done, status.work_waiting, status.load
                )
        return views

    def _ask(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)
