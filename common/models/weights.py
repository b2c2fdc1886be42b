"""Where weights come from, as a type, and the bookkeeping that no weight is left over. Names are HuggingFace's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.packed_store import PackedStore

ROPE_FACTORS = "rope_freqs.weight"
"""GGUF files of Llama 3.1 and later carry the stretching of the rotary frequencies as this tensor."""


@dataclass(frozen=True, slots=True)
class Part:
    """[start, end) along one axis of a tensor."""

    axis: int
    start: int
    end: int

    def cut(self, tensor: Tensor) -> Tensor:
        """The part of a whole tensor; shares its memory."""
        return tensor.narrow(self.axis, self.start, self.end - self.start)


class WeightSource(Protocol):
    """A checkpoint's tensors by HuggingFace name."""

    def names(self) -> frozenset[str]:
        """Every tensor that is there."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        ...

    def get(self, name: str, part: Part | None = None) -> Tensor:
        """The tensor, or a part of it, on the host, in the checkpoint's dtype. Raises ModelLoadError for bad files."""
        ...


class TrackedWeights:
    """A source that knows what was taken. What remains means that the model is not what we took it for."""

    def __init__(self, source: WeightSource, on_taken: Callable[[], None], packed: PackedStore | None = None) -> None:
        """`packed`: where packed weights are kept, and found when an earlier load left them."""
        self._source = source
        self.packed = packed
        self._left = set(source.names())
        self._on_taken = on_taken

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._source.names()

    def take(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """The tensor, checked for its shape; with `part`, no more than that."""
        if not self.has(name):
            raise ModelLoadError(f"the checkpoint has no tensor {name}")
        found = self._source.shape(name)
        if found != shape:
            raise ModelLoadError(f"tensor {name} has shape {found}, the configuration says {shape}")
        tensor = self._source.get(name, part)
        self.skip(name)
        self._on_taken()
        return tensor

    def skip(self, name: str) -> None:
        """Count a tensor as taken without reading it: a copy of something that was read or can be computed."""
        self._left.discard(name)

    def take_packed(self, name: str) -> None:
        """It was found packed."""
        if name in self._left:
            self.skip(name)
            self._on_taken()

    def skip_below(self, prefix: str) -> None:
        """Count every tensor whose name begins so as taken: a part of the model that is not used."""
        self._left = {name for name in self._left if not name.startswith(prefix)}

    def refuse_rest(self) -> None:
        """Raises ModelLoadError when a tensor was not taken."""
        if self._left:
            raise ModelLoadError(f"{len(self._left)} tensors are not supported, the first is {min(self._left)}")
