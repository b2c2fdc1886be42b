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

_LOCK = "lock"


def run_base() -> Path:
    """Where run directories are made: $XDG_RUNTIME_DIR, else the temporary directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) if runtime and os.access(runtime, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


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
