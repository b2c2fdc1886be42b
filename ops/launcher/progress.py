"""Reports how many nodes are up while a cluster starts slowly. Subscribes to announcements, as router workers do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Set
from typing import Protocol

from kvferry.common.config.endpoints import with_key
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.protocol.messages import Announce, Envelope
from kvferry.common.transport.announce import AnnouncementListener
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.security import load_security

LOOK_S = 1.0
LOOKS_PER_LINE = 10
"""A line every ten seconds: a small model is up before the first one."""


class Announcements(Protocol):
    """A source of announcements."""

    def receive(self) -> Iterator[Envelope]:
        """Those that arrived since the last call. Never blocks."""
        ...


@contextlib.asynccontextmanager
async def reporting_progress(
    config: ClusterConfig, names: Set[str], write_line: Callable[[str], None]
) -> AsyncIterator[None]:
    """Inside the context, write lines about the nodes of these names. Silent if the configuration has no proxy."""
    members = config.discovery.proxy_workers
    if not (members and config.discovery.proxy_nodes):
        yield
        return
    security = load_security(config.security, "router")
    context = TransportContext(security)
    listener = AnnouncementListener(context, config.limits)
    listener.connect(members if security is None else with_key(members, security.public))
    reporting = asyncio.create_task(report_progress(listener, names, write_line, lambda: asyncio.sleep(LOOK_S)))
    try:
        yield
    finally:
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting
        listener.close()
        context.close()


async def report_progress(
    source: Announcements, names: Set[str], write_line: Callable[[str], None], pause: Callable[[], Awaitable[None]]
) -> None:
    """Write a line after every LOOKS_PER_LINE pauses, until cancelled."""
    ready: set[str] = set()
    while True:
        for _ in range(LOOKS_PER_LINE):
            await pause()
            messages = (envelope.message for envelope in source.receive())
            ready |= names & {message.name for message in messages if isinstance(message, Announce)}
        write_line(f"{len(ready)} of {len(names)} nodes ready")
