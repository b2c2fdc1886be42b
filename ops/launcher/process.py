"""One running child process: starts it, relays its output line by line, signals it and its process group.

Makes no decisions: `core` does. Must run in an asyncio loop.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from kvferry.common.base.parent_death_signal import with_death_signal
from kvferry.ops.launcher.core import ChildPlan, error_of_line

WriteLine = Callable[[str, str], object]
"""Takes a child's name and a line of its output."""

_READ_BYTES = 1 << 16
_LAST_LINES_S = 10.0
"""Wait after the exit for the last lines, which say why it ended; long enough for a busy machine. Only a process that
left the child's group can hold the pipe that long."""
_PIPE_BYTES = 1 << 20
"""Capacity of the output pipe: the most that an unprivileged user may set."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a child."""

    plan: ChildPlan
    argv: tuple[str, ...]
    """The command; its first word must be an absolute path."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own environment."""
    pass_fds: tuple[int, ...] = ()
    death_signal: int = signal.SIGTERM
    """Signal to the child when the launcher is killed."""
    fresh_dirs: tuple[Path, ...] = ()
    """Directories to empty before each start."""


class Child:
    """One run of a child. It leads its own process group, so a Ctrl-C in the terminal does not reach it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, output: BinaryIO, write_line: WriteLine) -> None:
        self._name = name
        self._process = process
        self._output = output
        self._write_line = write_line
        self._last_line = ""
        self._held = ""
        """The last line if it is an error line: it is reported with the exit instead of being relayed."""

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill all processes of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> tuple[int, str]:
        """Relay its lines until it exits; returns the exit code (negative for a signal) and the last line. A last line
        that is an error line is not relayed."""
        relay = asyncio.create_task(self._relay())
        code = await self._process.wait()
        # Its own children would keep serving next to its successor, and they hold the pipe open.
        self.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(relay, _LAST_LINES_S)
        return code, self._last_line

    async def _relay(self) -> None:
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self._output)
        rest = b""
        try:
            while data := await stream.read(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._pass_on(line)
            if rest:
                self._pass_on(rest)
        finally:
            transport.close()

    def _pass_on(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if self._held:
            self._write_line(self._name, self._held)
        self._held = text if error_of_line(text) else ""
        if text:
            self._last_line = text
        if not self._held:
            self._write_line(self._name, text)


async def start_child(spec: ChildSpec, write_line: WriteLine) -> Child:
    """Start a child; its stdout and stderr go to `write_line(name, line)`. Raises OSError if it cannot be started."""
    for directory in spec.fresh_dirs:
        _make_empty(directory)
    output, write_fd = _output_pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *with_death_signal(spec.death_signal, spec.argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=write_fd,
            stderr=write_fd,
            env={**os.environ, **spec.env},
            pass_fds=spec.pass_fds,
            start_new_session=True,
        )
    except BaseException:
        output.close()
        raise
    finally:
        os.close(write_fd)
    return Child(spec.plan.name, process, output, write_line)


def prefixed(name: str, line: str) -> str:
    """The line with the child's name in front, unless it is a log line, which names the child already."""
    words = line.split(maxsplit=3)
    if line.startswith("{") or (len(words) > 2 and words[2].startswith(name)):
        return line
    return f"{name} | {line}"


def _output_pipe() -> tuple[BinaryIO, int]:
    """A pipe for a child's output: with asyncio's own pipe, waiting for the child would wait for every process that
    inherited the pipe.

    Writes to it never block, so a stopped (SIGSTOP) launcher does not stall the cluster.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    with contextlib.suppress(OSError):  # the user's quota for pipe memory is used up
        fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return os.fdopen(read_fd, "rb", buffering=0), write_fd


def _make_empty(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in directory.iterdir():
        entry.unlink()
