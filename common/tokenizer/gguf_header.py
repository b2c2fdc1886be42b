"""Reads the header of a GGUF file: metadata and tensor directory. Reads no tensor data and needs no package.

The `gguf` package's reader takes seconds for a vocabulary of 50,000 strings, since it maps each into an array. One pass
over the bytes takes a tenth of a second, and the router can use it. Format: GGUF versions 2 and 3, little-endian.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from kvferry.common.base.errors import ModelLoadError

GgufValue = bool | int | float | str | list["GgufValue"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Directory entry of one tensor."""

    name: str
    shape: tuple[int, ...]
    """In GGUF order: the fastest-changing dimension first."""
    ggml_type: int
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensor directory."""

    metadata: dict[str, GgufValue]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header. Raises ModelLoadError when the file is missing, is not GGUF, or is truncated."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ModelLoadError(f"{path} is not a GGUF file; expected a GGUF file or a HuggingFace directory")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).header()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read as GGUF: {error}") from error


class _Cursor:
    """A position in the mapped file that only moves forward."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        self._take(len(_MAGIC))  # already checked
        version = self._integer("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; known are {', '.join(map(str, _VERSIONS))}")
        tensor_count, value_count = self._integer("<Q"), self._integer("<Q")
        metadata: dict[str, GgufValue] = {}
        for _ in range(value_count):
            name = self._string()
            metadata[name] = self._value(self._integer("<I"))
        directory = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}, expected a positive integer")
        base = -(-self._at // alignment) * alignment
        tensors = tuple(GgufTensor(t.name, t.shape, t.ggml_type, base + t.offset) for t in directory)
        return GgufHeader(metadata, tensors)

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dimensions = self._integer("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions; at most {_MAX_DIMENSIONS} are supported")
        shape = tuple(self._integer("<Q") for _ in range(dimensions))
        return GgufTensor(name, shape, self._integer("<I"), self._integer("<Q"))

    def _value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(kind)

    def _array(self) -> list[GgufValue]:
        kind, count = self._integer("<I"), self._integer("<Q")
        if count > len(self._data):
            raise ValueError(f"an array claims {count} items, more than the file has bytes")
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind][1]}"
            return list(struct.unpack(layout, self._take(struct.calcsize(layout))))
        return [self._value(kind) for _ in range(count)]

    def _scalar(self, kind: int) -> bool | int | float:
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is unknown")
        layout = _SCALARS[kind]
        value: bool | int | float = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _integer(self, layout: str) -> int:
        return int(struct.unpack(layout, self._take(struct.calcsize(layout)))[0])

    def _string(self) -> str:
        return self._take(self._integer("<Q")).decode()

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ValueError(f"truncated at {len(self._data)} bytes; at least {end} are needed")
        taken = self._data[self._at : end]
        self._at = end
        return taken
