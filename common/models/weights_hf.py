"""Weights of a HuggingFace directory: model.safetensors, or shards with an index. Maps the files without copying."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.hf_files import safetensors_files
from kvferry.common.models.weights import Part


class HfWeights:
    """Implements WeightSource; a context manager that maps the files while it is open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._file_of: dict[str, safe_open] = {}

    def __enter__(self) -> Self:
        try:
            for path in safetensors_files(self._directory):
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._file_of.update(dict.fromkeys(file.keys(), file))
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file_of.clear()
        self._stack.close()

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    def get(self, name: str, part: Part | None = None) -> Tensor:
        """The tensor or a part of it, on the host in its own dtype; reads only that part of the file."""
        file = self._file_of[name]
        if part is None:
            tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        else:
            tensor = file.get_slice(name)[(slice(None),) * part.axis + (slice(part.start, part.end),)]  # type: ignore[no-untyped-call]
        return tensor
