"""A private directory for one run: sockets, the children's configuration, metrics files. Gone when the run is over.

What a killed run left behind is removed by the next one: a directory whose lock nobody holds has no owner.
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
"""Room for the name of a socket in it."""
SOCKET_PATH_BYTES = 107
"""What the kernel takes (sun_path)."""


def run_base() -> Path:
    """Where run directories are made: $XDG_RUNTIME_DIR, the temporary directory or /tmp, the first that will do.

    That is one that can be written, and whose path is short enough for sockets in it. KvferryError when none is.
    """
    places = [place for place in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp") if place]
    for place in places:
        if os.access(place, os.W_OK | os.X_OK) and has_room_for_sockets(Path(place)):
            return Path(place)
    raise KvferryError(
        f"no place for sockets: set XDG_RUNTIME_DIR or TMPDIR to a directory that can be written and whose path has at "
        f"most {SOCKET_PATH_BYTES - _below_bytes()} bytes; tried {', '.join(places)}"
    )


def has_room_for_sockets(base: Path) -> bool:
    """Whether a socket in a run directory below this one has a path that the kernel takes."""
    return len(os.fsencode(base.absolute())) + _below_bytes() <= SOCKET_PATH_BYTES


def _below_bytes() -> int:
    return len(f"/{_name('x' * _RANDOM_CHARS)}/") + _FILE_CHARS


@contextmanager
def run_directory(base: Path | None = None) -> Iterator[Path]:
    """A fresh directory, readable by this user alone, while the context lasts."""
    base = base or run_base()
    remove_left_over(base)
    # Hidden until it is locked, so that another launcher does not take it for one without an owner.
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
    """Remove this user's run directories that no process holds; returns them."""
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
