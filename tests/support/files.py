"""Atomic replacement of files."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Replace the content of a file with `data`. An interrupted call leaves the old content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(data)
    os.replace(fresh, path)
