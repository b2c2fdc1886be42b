"""Path of the small real model: the only file outside the repository that a test (marked `model`) may read."""

import os
from pathlib import Path

FILE_NAME = "smollm2-135m-instruct-q4_1.gguf"


def real_model_path() -> Path:
    """The GGUF file in the user's cache. Fails with instructions if it is missing."""
    cache = Path(os.environ.get("KVFERRY_CACHE", Path.home() / ".cache" / "kvferry"))
    path = cache / "models" / FILE_NAME
    assert path.is_file(), f"{path} is missing: run `make setup`, or skip these tests with -m 'not model'"
    return path
