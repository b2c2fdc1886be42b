"""A private directory for one run: sockets, the children's configuration, metrics files. Removed at the end.

The next run removes what a killed one left: a directory whose lock is free has no owner.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.common.base.errors import KvferryError

_LOCK = "lock"
_RANDOM_CHARS = 8
_FILE_CHARS = 16
"""Longest name of a socket in it."""
SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket (sun_path)."""


def run_base() -> Path:
    """Parent of run directories: the first of $XDG_RUNTIME_DIR, the temporary directory and /tmp that is writable and
    whose path is short enough for sockets. Raises KvferryError if none is."""
    places = [place for place in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp") if place]
    for place in places:
        if os.access(place, os.W_OK | os.X_OK) and has_room_for_sockets(Path(place)):
            return Path(place)
    raise KvferryError(
        f"no directory for sockets: set XDG_RUNTIME_DIR or TMPDIR to a writable directory with a path of at most "
        f"{SOCKET_PATH_BYTES - _below_bytes()} bytes; tried {', '.join(places)}"
    )


def has_room_for_sockets(base: Path) -> bool:
    """Whether the path of a socket in a run directory below `base` is short enough for the kernel."""
    return len(os.fsencode(base.absolute())) + _below_bytes() <= SOCKET_PATH_BYTES


def _below_bytes() -> int:
    return len(f"/{_name('x' * _RANDOM_CHARS)}/") + _FILE_CHARS


@contextmanager
def run_directory(base: Path | None = None) -> Iterator[Path]:
    """A new directory, readable by this user only; removed when the context ends."""
    base = base or run_base()
    remove_left_over(base)
    # Hidden until it is locked, so that another launcher does not remove it as one without an owner.
    hidden = Path(tempfile.mkdtemp(prefix=".kvferry-", dir=base))
    lock = os.open(hidden / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    path = base / _name(hidden.name.removeprefix(".kvferry-"))
    hidden.rename(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_left_over(base: Path) -> list[Path]:
    """Remove this user's run directories whose lock is free; returns them."""
    removed = []
    for path in base.glob(_name("*")):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except OSError:  # held: a launcher runs there
            continue
        finally:
            os.close(lock)
    return removed


def _name(rest: str) -> str:
    return f"kvferry-{os.getuid()}-{rest}"
