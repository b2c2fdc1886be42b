"""Wakes a polling thread from other threads and passes it items. The only thread-safe parts of the poll loop."""

import socket
import threading
from collections import deque
from typing import Generic, TypeVar

from kvferry.common.base.errors import InvariantError

ItemT = TypeVar("ItemT")


class Waker:
    """Makes a descriptor readable until it is cleared. Several `set` before a `clear` count as one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may interrupt a call on the same thread
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._is_set = False

    def open(self) -> None:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        with self._lock:
            if self._ends is not None:
                raise InvariantError("the waker is open already")
            self._ends = reader, writer
            if self._is_set:
                writer.send(b"\0")

    @property
    def poll_handle(self) -> int:
        """The descriptor for a PollLoop or an event loop; level-triggered."""
        with self._lock:
            if self._ends is None:
                raise InvariantError("the waker is not open")
            return self._ends[0].fileno()

    def set(self) -> None:
        """Wake the loop. May be called from any thread and from a signal handler.

        A call before `open` takes effect at `open`; after `close` it does nothing.
        """
        with self._lock:
            if not self._is_set:
                self._is_set = True
                if self._ends is not None:
                    self._ends[1].send(b"\0")

    def clear(self) -> None:
        """Reset the signal. The loop must clear first and look for work second, so that no `set` is lost."""
        with self._lock:
            if self._is_set:
                self._is_set = False
                if self._ends is not None:
                    self._ends[0].recv(1)

    def close(self) -> None:
        """Close the descriptors. May be called twice."""
        with self._lock:
            ends, self._ends = self._ends, None
        for end in ends or ():
            end.close()


class Inbox(Generic[ItemT]):
    """A FIFO that any thread may fill; the thread that polls `waker` empties it.

    It is unbounded: callers that may outrun the consumer need a bound of their own.
    """

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self._items: deque[ItemT] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: ItemT) -> None:
        """Add an item and wake the loop."""
        self._items.append(item)
        self._waker.set()

    def take_all(self) -> list[ItemT]:
        """Remove and return all items, oldest first. Clears the waker first."""
        self._waker.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items
