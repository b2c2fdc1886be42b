"""Looks at other processes, which may end while they are looked at, and stops them for a while."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more; it may still be there for its parent to ask how it ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def suspended(*processes: psutil.Process) -> Iterator[None]:
    """They do nothing meanwhile. Some may be killed."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def peers(process: psutil.Process) -> set[tuple[str, int]]:
    """The other ends of its TCP connections."""
    return {(found.raddr.ip, found.raddr.port) for found in process.net_connections("tcp") if found.raddr}


def num_listening(process: psutil.Process) -> int:
    """Descriptors of listening TCP sockets, those from its parents that it does not use among them."""
    return sum(found.status == psutil.CONN_LISTEN for found in process.net_connections("tcp"))
