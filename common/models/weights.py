"""The interface of a weight source, and a wrapper that ensures that no weight is left over. Names are HuggingFace's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.packed_store import PackedStore

ROPE_FACTORS = "rope_freqs.weight"
"""GGUF files of Llama 3.1 and later store the scaling of the rotary frequencies as this tensor."""


@dataclass(frozen=True, slots=True)
class Part:
    """[start, end) along one axis of a tensor."""

    axis: int
    start: int
    end: int

    def cut(self, tensor: Tensor) -> Tensor:
        """Slice a whole tensor; the result shares its memory."""
        return tensor.narrow(self.axis, self.start, self.end - self.start)


class WeightSource(Protocol):
    """A checkpoint's tensors by HuggingFace name."""

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an existing tensor."""
        ...

    def get(self, name: str, part: Part | None = None) -> Tensor:
        """The tensor or a part of it, on the host in the checkpoint's dtype. Raises ModelLoadError if it is damaged."""
        ...


class TrackedWeights:
    """A source that tracks which tensors were taken. A tensor left over means that the model is not what its
    configuration claims."""

    def __init__(self, source: WeightSource, on_taken: Callable[[], None], packed: PackedStore | None = None) -> None:
        """`on_taken` is called for each tensor taken. `packed`: the store of packed weights, if any."""
        self._source = source
        self.packed = packed
        self._left = set(source.names())
        self._on_taken = on_taken

    def has(self, name: str) -> bool:
        return name in self._source.names()

    def take(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """Read the tensor, or only `part` of it. Raises ModelLoadError if it is missing or its shape differs."""
        if not self.has(name):
            raise ModelLoadError(f"the checkpoint has no tensor {name}")
        found = self._source.shape(name)
        if found != shape:
            raise ModelLoadError(f"tensor {name} has shape {found}, but the configuration implies {shape}")
        tensor = self._source.get(name, part)
        self.skip(name)
        self._on_taken()
        return tensor

    def skip(self, name: str) -> None:
        """Mark a tensor as taken without reading it: it duplicates one that was read, or can be computed."""
        self._left.discard(name)

    def take_packed(self, name: str) -> None:
        """Mark a tensor as taken that the packed store already holds."""
        if name in self._left:
            self.skip(name)
            self._on_taken()

    def skip_below(self, prefix: str) -> None:
        """Mark all tensors with this name prefix as taken: a part of the model that is not used."""
        self._left = {name for name in self._left if not name.startswith(prefix)}

    def refuse_rest(self) -> None:
        """Raise ModelLoadError if a tensor was not taken."""
        if self._left:
            raise ModelLoadError(f"{len(self._left)} tensors are not supported; the first is {min(self._left)}")
