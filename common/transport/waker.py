"""Waking a polling thread from other threads, and handing it things. The only thread-safe parts of the loop."""

import socket
import threading
from collections import deque
from typing import Generic, TypeVar

from kvferry.common.base.errors import InvariantError

T = TypeVar("T")


class Wakeup:
    """Makes a descriptor readable until it is cleared. Any number of `set` before a `clear` count as one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in the middle of its own thread's call
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._is_set = False

    def open(self) -> None:
        """Make the descriptors."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        with self._lock:
            if self._ends is not None:
                raise InvariantError("the wakeup is open already")
            self._ends = reader, writer
            if self._is_set:
                writer.send(b"\0")

    @property
    def poll_handle(self) -> int:
        """The descriptor that a PollLoop (or an event loop) waits for; level-triggered."""
        with self._lock:
            if self._ends is None:
                raise InvariantError("the wakeup is not open")
            return self._ends[0].fileno()

    def set(self) -> None:
        """Wake the loop; from any thread and from signal handlers.

        Before `open` it is remembered, after `close` it does nothing.
        """
        with self._lock:
            if not self._is_set:
                self._is_set = True
                if self._ends is not None:
                    self._ends[1].send(b"\0")

    def clear(self) -> None:
        """Take the signal back. The loop clears first and looks for work second, so that no `set` is lost."""
        with self._lock:
            if self._is_set:
                self._is_set = False
                if self._ends is not None:
                    self._ends[0].recv(1)

    def close(self) -> None:
        """Close the descriptors. Twice does no harm."""
        with self._lock:
            ends, self._ends = self._ends, None
        for end in ends or ():
            end.close()


class Inbox(Generic[T]):
    """Things put in by any thread and taken out, in order, by the one that polls `wakeup`.

    It has no bound of its own: whoever puts in more than is taken out needs one.
    """

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._items: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item and wake the loop."""
        self._items.append(item)
        self._wakeup.set()

    def take_all(self) -> list[T]:
        """All that is there, oldest first. Clears the wakeup before it looks."""
        self._wakeup.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items
