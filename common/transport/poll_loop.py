"""A poll loop for a thread that owns sockets: polls them and calls back for each ready one. Starts no thread."""

import math
from collections.abc import Callable
from typing import Protocol

import zmq

from kvferry.common.base.errors import InvariantError


class Pollable(Protocol):
    """A socket of this package, or an object with a file descriptor."""

    @property
    def poll_handle(self) -> "zmq.Socket[bytes] | int": ...


class PollLoop:
    """Watched sources and their callbacks. Used by one thread; other threads wake it with a `Waker`."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._callbacks: dict[zmq.Socket[bytes] | int, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, source: Pollable, on_ready: Callable[[], object]) -> None:
        """Call `on_ready` when the source is readable, and again (level-triggered) while it still is."""
        handle = source.poll_handle
        if handle in self._callbacks:
            raise InvariantError("this source is already watched")
        self._callbacks[handle] = on_ready
        self._poller.register(handle, zmq.POLLIN)

    def watch_writable(self, source: Pollable, enabled: bool) -> None:
        """Whether to call `on_ready` also when the source is writable. Only for a LinkSocket, which has one peer.

        A NodeSocket is writable as soon as any of its peers is, so the loop would spin.
        """
        handle = source.poll_handle
        if handle not in self._callbacks:
            raise InvariantError("this source is not watched")
        self._poller.register(handle, zmq.POLLIN | zmq.POLLOUT if enabled else zmq.POLLIN)

    def remove(self, source: Pollable) -> None:
        """Stop watching a source, before it is closed. May be called from a callback."""
        handle = source.poll_handle
        if self._callbacks.pop(handle, None) is not None:
            self._poller.unregister(handle)

    def run_once(self, timeout_s: float | None) -> int:
        """Wait for ready sources at most `timeout_s` (None: for ever) and call back; returns the number of them."""
        # Rounded up: rounding a wait of less than a millisecond down would make the loop spin.
        timeout_ms = None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)
        ready = self._poller.poll(timeout_ms)
        for handle, _ in ready:
            callback = self._callbacks.get(handle)
            if callback is not None:
                callback()
        return len(ready)
