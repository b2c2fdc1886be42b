"""Where the small real model lies. The only thing outside the repository that a test may read (marked `model`)."""

import os
from pathlib import Path

FILE_NAME = "smollm2-135m-instruct-q4_1.gguf"


def real_model_path() -> Path:
    """The GGUF file in the user's cache; a missing one is a failure that says what to do."""
    cache = Path(os.environ.get("KVFERRY_CACHE", Path.home() / ".cache" / "kvferry"))
    path = cache / "models" / FILE_NAME
    assert path.is_file(), f"{path} is missing: `make setup` brings it, or leave these tests out with -m 'not model'"
    return path
