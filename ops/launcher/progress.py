"""Tells how many nodes are up while a cluster starts slowly. Hears what router workers hear: announcements."""

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
"""A small model is up before the first line; one that takes minutes says every ten seconds how far it is."""


class Announcements(Protocol):
    """What came since it was asked last."""

    def receive(self) -> Iterator[Envelope]:
        """Never waits."""
        ...


@contextlib.asynccontextmanager
async def telling_progress(config: ClusterConfig, names: Set[str], tell: Callable[[str], None]) -> AsyncIterator[None]:
    """Meanwhile, lines about the nodes of these names. Silent where the configuration has no proxy to hear."""
    members = config.discovery.proxy_workers
    if not (members and config.discovery.proxy_nodes):
        yield
        return
    security = load_security(config.security, "router")
    context = TransportContext(security)
    listener = AnnouncementListener(context, config.limits)
    listener.connect(members if security is None else with_key(members, security.public))
    telling = asyncio.create_task(tell_progress(listener, names, tell, lambda: asyncio.sleep(LOOK_S)))
    try:
        yield
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling
        listener.close()
        context.close()


async def tell_progress(
    heard: Announcements, names: Set[str], tell: Callable[[str], None], pause: Callable[[], Awaitable[None]]
) -> None:
    """A line after every so many pauses, without end."""
    ready: set[str] = set()
    while True:
        for _ in range(LOOKS_PER_LINE):
            await pause()
            said = (envelope.message for envelope in heard.receive())
            ready |= names & {message.name for message in said if isinstance(message, Announce)}
        tell(f"{len(ready)} of {len(names)} nodes ready")
