"""Reads a checkpoint's JSON files; every way to fail is a ModelLoadError."""

from pathlib import Path

import orjson

from kvferry.common.errors import ModelLoadError


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file. Raises ModelLoadError when it is missing or is something else."""
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path.name} is missing in {path.parent}") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return value
