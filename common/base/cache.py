"""Where kvferry keeps what it made or fetched once for a user. Creates nothing."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$KVFERRY_CACHE, else ~/.cache/kvferry."""
    given = os.environ.get("KVFERRY_CACHE", "")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "kvferry"
