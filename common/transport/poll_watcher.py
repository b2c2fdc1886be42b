"""Watches the client links of a node in its poll loop, and runs probes in short-lived threads."""

import logging
import threading
from collections.abc import Callable

from kvferry.common.protocol.wire import Frame
from kvferry.common.transport.client_links import StopWatching
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.monitor import ConnectionEvent, LinkMonitor
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.probe import ProbeResult, probe

_LOG = logging.getLogger("kvferry.links")


class PollWatcher:
    """Implements `common.transport.client_links.Watcher` for one control thread."""

    def __init__(self, loop: PollLoop, call_in_loop: Callable[[Callable[[], None]], None]) -> None:
        self._loop = loop
        self._call_in_loop = call_in_loop
        self._warned_no_thread = False

    def watch_link(self, link: LinkSocket, on_message: Callable[[list[Frame]], None]) -> StopWatching:

        def ready() -> None:
            for frames in link.receive():
                on_message(frames)
                if not link.is_open:
                    return

        self._loop.add(link, ready)
        return lambda: self._loop.remove(link)

    def watch_monitor(self, monitor: LinkMonitor, on_event: Callable[[ConnectionEvent], None]) -> StopWatching:

        def ready() -> None:
            for event in monitor.receive():
                on_event(event)

        self._loop.add(monitor, ready)
        return lambda: self._loop.remove(monitor)

    def probe(self, endpoint: str, timeout_s: float, on_result: Callable[[ProbeResult], None]) -> None:
        """Probe in a thread, because resolving a name may take long. UNKNOWN when no thread can be started."""

        def run() -> None:
            result = probe(endpoint, timeout_s)
            self._call_in_loop(lambda: on_result(result))

        try:
            threading.Thread(target=run, name="probe", daemon=True).start()
        except RuntimeError as error:
            if not self._warned_no_thread:
                self._warned_no_thread = True
                _LOG.warning("cannot probe %s: %s", endpoint, error)
            self._call_in_loop(lambda: on_result(ProbeResult.UNKNOWN))
