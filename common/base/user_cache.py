"""The user's cache directory: native ops, packed weights, the downloaded model. Creates nothing."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$KVFERRY_CACHE, else ~/.cache/kvferry."""
    configured = os.environ.get("KVFERRY_CACHE", "")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "kvferry"
