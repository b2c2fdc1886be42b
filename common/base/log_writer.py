"""Writes lines to a file descriptor without ever blocking: a line that its reader does not take is dropped.

A process that blocks in a write serves no request, misses its deadlines and looks dead to its peers. Does not interpret
the lines.
"""

import os
import select

STDOUT_FD, STDERR_FD = 1, 2

_PIECE_BYTES = select.PIPE_BUF
"""A pipe that polls as writable takes this many bytes without blocking; a larger write may block half way."""


class LogWriter:
    """Writes lines to one descriptor. Used by one thread at a time; does not close the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._torn = False
        """The last line was written in part, so the next one must start on a new line."""

    def write(self, line: str) -> bool:
        """Write the line and a newline. False when all or part of it was dropped: the reader is slow or gone."""
        data = f"\n{line}\n" if self._torn else f"{line}\n"
        rest = memoryview(data.encode("utf-8", "backslashreplace"))
        size = len(rest)
        try:
            while rest and self._poll.poll(0):
                rest = rest[os.write(self._fd, rest[:_PIECE_BYTES]) :]
        except OSError:  # full after all (other processes write to it too), or its reader has closed it
            pass
        if len(rest) < size:
            self._torn = len(rest) > 0
        return not rest
