"""One running child: starting it, passing its lines on, signals to it and to what it started. Decides nothing."""

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
from kvferry.ops.launcher.core import ChildPlan
from kvferry.ops.launcher.startup_error import startup_error

WriteLine = Callable[[str, str], object]
"""Takes a child's name and one of its lines."""

_READ_BYTES = 1 << 16
_LAST_LINES_S = 10.0
"""Its last line says why it ended, also on a busy machine. Only what left its group can hold the pipe for so long."""
_PIPE_BYTES = 1 << 20
"""Of lines that wait to be passed on: the most that any user may have."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A child to run."""

    plan: ChildPlan
    argv: tuple[str, ...]
    """The command; its first word is an absolute path."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own environment."""
    pass_fds: tuple[int, ...] = ()
    death_signal: int = signal.SIGTERM
    """What it gets when the launcher itself is killed."""
    fresh_dirs: tuple[Path, ...] = ()
    """Directories that are empty whenever it starts."""


class Child:
    """One life of a child. It leads a process group of its own, so a Ctrl-C in the terminal does not reach it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, output: BinaryIO, write_line: WriteLine) -> None:
        self._name = name
        self._process = process
        self._output = output
        self._write_line = write_line
        self._last_line = ""
        self._held = ""
        """Its last line where that says why it ends: whoever takes the end says it, once."""

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._process.pid

    def terminate(self) -> None:
        """Ask it to stop."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill it and whatever it started that is still in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> tuple[int, str]:
        """Pass its lines on until it is gone; (exit code, its last line). The code is negative for a signal. A last
        line that says why it ends is not passed on."""
        relay = asyncio.create_task(self._relay())
        code = await self._process.wait()
        # What it started would go on serving beside its successor, and holds the pipe open.
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
        self._held = text if startup_error(text) else ""
        if text:
            self._last_line = text
        if not self._held:
            self._write_line(self._name, text)


async def start_child(spec: ChildSpec, write_line: WriteLine) -> Child:
    """Start a child whose stdout and stderr go line by line to `write_line(name, line)`. OSError when it cannot be."""
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
    """The line with the child's name before it, unless it is a log line, which says it itself."""
    words = line.split(maxsplit=3)
    if line.startswith("{") or (len(words) > 2 and words[2].startswith(name)):
        return line
    return f"{name} | {line}"


def _output_pipe() -> tuple[BinaryIO, int]:
    """A pipe of our own: asyncio's would make the wait for the child a wait for all that inherited the pipe.

    Whoever writes to it never waits: a launcher that is stopped would bring everything to a stand.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    with contextlib.suppress(OSError):  # all pipes of this user have the most they may have
        fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return os.fdopen(read_fd, "rb", buffering=0), write_fd


def _make_empty(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in directory.iterdir():
        entry.unlink()
