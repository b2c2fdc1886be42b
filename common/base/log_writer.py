"""Lines to a file descriptor that somebody may have stopped reading: they are dropped then, nobody waits for a reader.

A process that stands still in a write serves nobody, holds its deadlines up and looks dead to its peers. Knows nothing
of what the lines say.
"""

import os
import select

STDOUT_FD, STDERR_FD = 1, 2

_PIECE_BYTES = select.PIPE_BUF
"""What a pipe that is ready takes without a wait; more may block half way."""


class LogWriter:
    """Writes to one descriptor, whole lines as far as they are taken. One thread at a time; does not close it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._torn = False
        """The last line was written in part: the next one begins on a line of its own."""

    def write(self, line: str) -> bool:
        """The line and a newline. False: it is lost, or its end is; nobody reads, or the reader has gone."""
        data = f"\n{line}\n" if self._torn else f"{line}\n"
        rest = memoryview(data.encode("utf-8", "backslashreplace"))
        size = len(rest)
        try:
            while rest and self._poll.poll(0):
                rest = rest[os.write(self._fd, rest[:_PIECE_BYTES]) :]
        except OSError:  # full after all (others write to it too), or it has no reader any more
            pass
        if len(rest) < size:
            self._torn = len(rest) > 0
        return not rest
