"""Files of a HuggingFace directory: reads its JSON files and lists its weight files. Every failure is a ModelLoadError.

Reads no weights and imports no torch.
"""

from pathlib import Path

import orjson

from kvferry.common.base.errors import ModelLoadError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object. Raises ModelLoadError if the file is missing or holds anything else."""
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path.name} is missing in {path.parent}") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value


def safetensors_files(directory: Path) -> tuple[Path, ...]:
    """The checkpoint's weight files, sorted by name. Raises ModelLoadError if one is missing."""
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
