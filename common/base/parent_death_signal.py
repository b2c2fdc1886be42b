"""Runs a command that dies with its parent: `python with_death_signal.py PARENT_PID SIGNAL command args...`.

Asks the kernel (Linux) to send SIGNAL when the parent ends, then becomes the command; the wish outlives exec. Elsewhere
it just becomes the command. Run by its path, so that it imports nothing of the project and starts at once.
"""

import ctypes
import os
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, signal_number: int) -> bool:
    """Make the kernel send the signal when the parent ends; False when the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    return os.getppid() == parent_pid


def with_death_signal(signal_number: int, command: Iterable[str]) -> tuple[str, ...]:
    """The command, for the calling process to start: it gets the signal when the thread that starts it ends."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(signal_number)), *command)


def main() -> None:
    """Become the command."""
    parent_pid, signal_number, *command = sys.argv[1:]
    if not die_with_parent(int(parent_pid), int(signal_number)):
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
