"""Files that are there as a whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` in the place of what the file holds; whoever stops in the middle leaves the old content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(data)
    os.replace(fresh, path)
