"""Reads a checkpoint's JSON files; every way to fail is a ModelLoadError.

Which files of a HuggingFace directory hold its weights. Reads none of them; no torch.
"""

from pathlib import Path

import orjson

from kvferry.common.base.errors import ModelLoadError


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


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def safetensors_files(directory: Path) -> tuple[Path, ...]:
    """The checkpoint's files, sorted by name. Raises ModelLoadError when there are none or one is missing."""
    if (directory / _INDEX).exists():
        files = tuple(directory / name for name in sorted(set(_weight_map(directory).values())))
    else:
        files = (directory / _SINGLE,)
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{file.name} is missing in {directory}")
    return files


def _weight_map(directory: Path) -> dict[str, str]:
    mapping = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(name, str) and "/" not in name for name in mapping.values()):
        raise ModelLoadError(f"{_INDEX} has no weight_map of file names")
    return mapping
