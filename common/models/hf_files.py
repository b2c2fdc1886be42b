"""Which files of a HuggingFace directory hold its weights. Reads none of them; no torch."""

from pathlib import Path

from kvferry.common.errors import ModelLoadError
from kvferry.common.models.json_file import read_json

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
