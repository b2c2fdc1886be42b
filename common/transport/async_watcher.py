"""Watches the client links of a router worker in its asyncio loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from kvferry.common.protocol.wire import Frame
from kvferry.common.transport.async_receiver import AsyncReceiver
from kvferry.common.transport.client_links import StopWatching
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.monitor import ConnectionEvent, LinkMonitor
from kvferry.common.transport.probe import ProbeResult, probe_async

MAX_DRAINED = 5000
"""Messages of one socket that `drain` handles before other callbacks of the loop may run."""
_AnyReceiver = AsyncReceiver[list[Frame]] | AsyncReceiver[ConnectionEvent]


class AsyncWatcher:
    """Implements `common.transport.client_links.Watcher`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._receivers: dict[_AnyReceiver, None] = {}
        self._probes: set[asyncio.Task[None]] = set()

    def watch_link(self, link: LinkSocket, on_message: Callable[[list[Frame]], None]) -> StopWatching:
        return self._watch(AsyncReceiver(self._loop, link, on_message))

    def watch_monitor(self, monitor: LinkMonitor, on_event: Callable[[ConnectionEvent], None]) -> StopWatching:
        return self._watch(AsyncReceiver(self._loop, monitor, on_event))

    def drain(self) -> None:
        """Handle all waiting messages and events now."""
        for receiver in list(self._receivers):
            receiver.drain(MAX_DRAINED)

    def _watch(self, receiver: _AnyReceiver) -> StopWatching:
        receiver.open()
        self._receivers[receiver] = None

        def close() -> None:
            receiver.close()
            self._receivers.pop(receiver, None)

        return close

    def probe(self, endpoint: str, timeout_s: float, on_result: Callable[[ProbeResult], None]) -> None:
        """Probe in a task of the loop."""

        async def run() -> None:
            on_result(await probe_async(endpoint, timeout_s))

        task = self._loop.create_task(run())
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def close(self) -> None:
        """Cancel running probes."""
        for task in list(self._probes):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
