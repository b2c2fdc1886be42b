"""Inspects other processes, which may exit meanwhile, and suspends them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether it has exited; it may still be a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def suspended(*processes: psutil.Process) -> Iterator[None]:
    """Suspend them inside the context. They may be killed meanwhile."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def peers(process: psutil.Process) -> set[tuple[str, int]]:
    """Remote addresses of its TCP connections."""
    return {(found.raddr.ip, found.raddr.port) for found in process.net_connections("tcp") if found.raddr}


def num_listening(process: psutil.Process) -> int:
    """Number of its descriptors of listening TCP sockets, including inherited ones that it does not use."""
    return sum(found.status == psutil.CONN_LISTEN for found in process.net_connections("tcp"))
