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
