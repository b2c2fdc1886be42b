"""Receives from a ZeroMQ socket in an asyncio loop (also uvloop), using the socket's descriptor. Owns no socket.

ZeroMQ's descriptor is edge-triggered: it signals each change once, and a send may consume the signal. So the receiver
drains the socket at each signal and checks it again after each send.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from kvferry.common.base.errors import InvariantError
from kvferry.common.transport.link_socket import LinkSocket

BATCH = 128
"""Messages handled before other callbacks of the loop may run."""

MessageT = TypeVar("MessageT")
MessageT_co = TypeVar("MessageT_co", covariant=True)


class AsyncSource(Protocol[MessageT_co]):
    """A socket to receive from: LinkSocket, LinkMonitor, AnnouncementListener."""

    @property
    def fd(self) -> int:
        """The descriptor, edge-triggered."""
        ...

    def readable(self) -> bool: ...

    def receive(self, limit: int = ...) -> Iterator[MessageT_co]: ...


class AsyncReceiver(Generic[MessageT]):
    """Calls `on_message` with each message of one source, on the loop's thread, in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, source: AsyncSource[MessageT], on_message: Callable[[MessageT], None]
    ) -> None:
        self._loop = loop
        self._source = source
        anything: object = source
        self._link = anything if isinstance(anything, LinkSocket) else None
        self._on_message = on_message
        self._fd: int | None = None
        self._again: asyncio.Handle | None = None

    def open(self) -> None:
        """Start receiving from a source that is already open. The outbox of a LinkSocket is flushed as well."""
        if self._fd is not None:
            raise InvariantError("the receiver is open already")
        self._fd = self._source.fd
        self._loop.add_reader(self._fd, self._check)
        if self._link is not None:
            self._link.after_send = self._recheck
        self._soon()

    def close(self) -> None:
        """Stop receiving, before the source is closed. May be called from a callback, and twice."""
        if self._fd is None:
            return
        self._loop.remove_reader(self._fd)
        self._fd = None
        if self._link is not None:
            self._link.after_send = None
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def drain(self, limit: int) -> None:
        """Handle up to about `limit` waiting messages now. For a process that resumes, before it checks timers."""
        while limit > 0 and self._is_open() and self._source.readable():
            self._check()
            limit -= BATCH

    def _check(self) -> None:
        self._again = None
        if self._fd is None:
            return
        try:
            for message in self._source.receive(BATCH):
                self._on_message(message)
                if not self._is_open():
                    return
            if self._link is not None and self._link.has_pending:
                self._link.flush()
        finally:
            # Also when a callback raised: the signal is consumed, and the remaining messages would never be handled.
            self._recheck()

    def _is_open(self) -> bool:
        return self._fd is not None

    def _recheck(self) -> None:
        if self._is_open() and self._again is None and self._source.readable():
            self._soon()

    def _soon(self) -> None:
        self._again = self._loop.call_soon(self._check)
