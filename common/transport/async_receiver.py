"""Receiving in an asyncio loop (uvloop too) by the socket's descriptor. Owns no socket.

ZeroMQ's descriptor is edge-triggered: it signals that something changed, once, and sending may use that signal up.
So everything is drained at each signal, and the socket is asked again after each send.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from kvferry.common.base.errors import InvariantError
from kvferry.common.transport.link_socket import LinkSocket

BATCH = 128
"""Messages handled before other callbacks of the loop get their turn."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class AsyncSource(Protocol[T_co]):
    """What can be received from: LinkSocket, LinkMonitor, AnnouncementListener."""

    @property
    def fd(self) -> int:
        """The descriptor, edge-triggered."""
        ...

    def readable(self) -> bool:
        """Whether something is there."""
        ...

    def receive(self, limit: int = ...) -> Iterator[T_co]:
        """What is there now."""
        ...


class AsyncReceiver(Generic[T]):
    """Calls back with each message of one source, on the loop's thread, in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, source: AsyncSource[T], on_message: Callable[[T], None]
    ) -> None:
        self._loop = loop
        self._source = source
        anything: object = source
        self._link = anything if isinstance(anything, LinkSocket) else None
        self._on_message = on_message
        self._fd: int | None = None
        self._again: asyncio.Handle | None = None

    def open(self) -> None:
        """Start to call back. The source is open already; a LinkSocket's outbox is flushed from here too."""
        if self._fd is not None:
            raise InvariantError("the receiver is open already")
        self._fd = self._source.fd
        self._loop.add_reader(self._fd, self._check)
        if self._link is not None:
            self._link.after_send = self._recheck
        self._soon()

    def close(self) -> None:
        """Stop calling back; before the source is closed, and fine from within a callback. Twice does no harm."""
        if self._fd is None:
            return
        self._loop.remove_reader(self._fd)
        self._fd = None
        if self._link is not None:
            self._link.after_send = None
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def drain(self, most: int) -> None:
        """Take in what is there, in one go and at most so much: for a process that slept, before it judges by time."""
        while most > 0 and self._is_open() and self._source.readable():
            self._check()
            most -= BATCH

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
            # Also when a callback raised: the signal is used up, and what is left would never be seen.
            self._recheck()

    def _is_open(self) -> bool:
        return self._fd is not None

    def _recheck(self) -> None:
        if self._is_open() and self._again is None and self._source.readable():
            self._soon()

    def _soon(self) -> None:
        self._again = self._loop.call_soon(self._check)
