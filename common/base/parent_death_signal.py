"""Runs a command that dies with its parent: `python parent_death_signal.py PARENT_PID SIGNAL command args...`.

On Linux it asks the kernel to send SIGNAL when the parent ends, then executes the command: the setting survives exec.
On other systems it only executes the command. It is run by its path, imports nothing of this project and so starts
quickly.
"""

import ctypes
import os
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, signal_number: int) -> bool:
    """Make the kernel send this process the signal when its parent ends. False when the parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    return os.getppid() == parent_pid


def with_death_signal(signal_number: int, command: Iterable[str]) -> tuple[str, ...]:
    """The command to start in place of `command`: it receives the signal when the thread that started it ends."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(signal_number)), *command)


def main() -> None:
    parent_pid, signal_number, *command = sys.argv[1:]
    if not die_with_parent(int(parent_pid), int(signal_number)):
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
