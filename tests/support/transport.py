"""Helpers for tests with real sockets: waiting for a condition, contexts and descriptors that must not leak."""

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from kvferry.common.base.errors import ConfigError
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.security import Security
from tests.support.eventually import PATIENCE_S

DEADLINE_S = PATIENCE_S

T = TypeVar("T")


def wait_until(
    condition: Callable[[], object], *, step: Callable[[], object] | None = None, deadline_s: float = DEADLINE_S
) -> None:
    """Run `step` (default: wait 2 ms) until the condition holds; AssertionError at the deadline."""
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_at, f"the condition did not hold within {deadline_s} s"
        if step is not None:
            step()
        select.select([], [], [], 0.002)


def take_one(receive: Callable[[], Iterator[T]], *, step: Callable[[], object] | None = None) -> T:
    """The next message of a socket's `receive`; AssertionError at the deadline or when more than one comes."""
    taken: list[T] = []

    def take() -> list[T]:
        taken.extend(receive())
        return taken

    wait_until(take, step=step)
    assert len(taken) == 1
    return taken[0]


def bind_again(node: NodeSocket, endpoint: str) -> None:
    """Bind where another socket was just closed: ZeroMQ releases the address a moment later."""

    def bound() -> bool:
        try:
            node.bind(endpoint)
        except ConfigError:
            return False
        return True

    wait_until(bound)


def num_fds() -> int:
    """Open descriptors of this process."""
    return len(_open_files())


def _open_files() -> dict[str, str]:
    """Descriptor number -> its target, where the system shows it. Includes the descriptor used for listing."""
    folder = Path("/proc/self/fd") if sys.platform == "linux" else Path("/dev/fd")
    found = {}
    for entry in folder.iterdir():
        found[entry.name] = ""
        with suppress(OSError):
            found[entry.name] = os.readlink(entry)
    return found


@cache
def large_frame_sent() -> None:
    """Create pyzmq's thread for large frames, as a process' first KV mover does: it stays, and is not a leak."""
    context = TransportContext()
    context.prepare_zero_copy()
    context.close()


@contextmanager
def nothing_left(*, threads: bool = False) -> Iterator[None]:
    """Fails if descriptors or, with `threads`, threads remain at the end. Fewer than before are accepted."""
    large_frame_sent()
    before, count = _open_files(), threading.active_count()
    yield
    give_up_at = time.monotonic() + DEADLINE_S
    while num_fds() > len(before) or (threads and threading.active_count() > count):
        if time.monotonic() > give_up_at:
            new = {number: what for number, what in _open_files().items() if before.get(number) != what}
            raise AssertionError(f"new descriptors: {new}; threads: {threading.enumerate()}, {count} before")
        select.select([], [], [], 0.002)


@contextmanager
def transport_context(security: Security | None = None) -> Iterator[TransportContext]:
    """A context. Fails if it has open sockets at the end, or leaks descriptors."""
    with nothing_left():
        context = TransportContext(security)
        yield context
        context.check_invariants()
        assert context.open_sockets() == ()
        context.close()


@contextmanager
def closing() -> Iterator[ExitStack]:
    """A stack for several connected contexts. Fails if descriptors or threads remain when it has closed them."""
    with nothing_left(threads=True), ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, security: Security | None = None) -> TransportContext:
    """A context that the stack closes after everything pushed later."""
    context = TransportContext(security)
    stack.callback(context.close)
    return context


def ipc_endpoint(folder: Path) -> str:
    """An ipc endpoint in a test's folder, short enough for the system's limit."""
    return f"ipc://{os.path.relpath(folder)}/s" if len(str(folder)) > 80 else f"ipc://{folder}/s"
