"""Looks at other processes, which may end while they are looked at."""

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more; it may still be there for its parent to ask how it ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
