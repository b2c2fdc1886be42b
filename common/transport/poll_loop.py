"""The wait of a thread that owns sockets: polls them, and calls back for those that are ready. No thread of its own."""

import math
from collections.abc import Callable
from typing import Protocol

import zmq

from kvferry.common.base.errors import InvariantError


class Pollable(Protocol):
    """A socket of this package, or anything with a descriptor."""

    @property
    def poll_handle(self) -> "zmq.Socket[bytes] | int":
        """What is polled."""
        ...


class PollLoop:
    """Which sources are watched, and who is told. Used by one thread; `Wakeup` is how others reach it."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._callbacks: dict[zmq.Socket[bytes] | int, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, source: Pollable, on_ready: Callable[[], object]) -> None:
        """Watch a source for something to receive. `on_ready` takes what is there; what it leaves is told again."""
        handle = source.poll_handle
        if handle in self._callbacks:
            raise InvariantError("this source is watched already")
        self._callbacks[handle] = on_ready
        self._poller.register(handle, zmq.POLLIN)

    def want_room(self, source: Pollable, wanted: bool) -> None:
        """Whether `on_ready` is called for room to send as well. Only for a LinkSocket: it has one peer.

        A NodeSocket has room as soon as any of its peers has; waiting for that would spin.
        """
        handle = source.poll_handle
        if handle not in self._callbacks:
            raise InvariantError("this source is not watched")
        self._poller.register(handle, zmq.POLLIN | zmq.POLLOUT if wanted else zmq.POLLIN)

    def remove(self, source: Pollable) -> None:
        """Forget a source; before it is closed. Fine from within a callback."""
        handle = source.poll_handle
        if self._callbacks.pop(handle, None) is not None:
            self._poller.unregister(handle)

    def run_once(self, timeout_s: float | None) -> int:
        """Wait until something is ready or the time is over (None: for ever), call back; how many were ready."""
        # Rounded up: a wait of less than a millisecond would else become a spin.
        timeout_ms = None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)
        ready = self._poller.poll(timeout_ms)
        for handle, _ in ready:
            callback = self._callbacks.get(handle)
            if callback is not None:
                callback()
        return len(ready)
