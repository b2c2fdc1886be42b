"""The interface of a model family: a class that computes (`CausalLM`) and a reader of its settings. Types only.

A family is one file that defines both, and one line in `registry`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from kvferry.common.device.base import Device, KvTensorSpec
from kvferry.common.device.ops import AttentionMetadata
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.settings import Settings
from kvferry.common.models.weights import TrackedWeights
from kvferry.common.parallel.collectives import ALONE, Collectives

LayerDone = Callable[[int], None]
"""Called with the number of layers whose kernels have been launched so far: 1, 2, ..."""


class CausalLM(Protocol):
    """A decoder with weights on one device. T tokens of a ragged batch, concatenated."""

    config: TransformerConfig
    kv_specs: tuple[KvTensorSpec, ...]
    """One layer's cache tensors on this rank; the same for every layer."""

    @classmethod
    def load(
        cls,
        config: TransformerConfig,
        weights: TrackedWeights,
        device: Device,
        dtype: torch.dtype,
        collectives: Collectives = ALONE,
        scheme: WeightScheme | None = None,
    ) -> Self:
        """Take all weights, or this rank's part of them, convert and pack them."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[tuple[Tensor, ...]],
        meta: AttentionMetadata,
        on_layer: LayerDone | None = None,
    ) -> Tensor:
        """token_ids and positions [T] int64, caches one tuple per layer -> hidden states [T, hidden], not normalised.

        `on_layer` is called after each layer.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] of the positions to sample -> [n, vocab] float32."""
        ...


@dataclass(frozen=True, slots=True)
class HfSettings:
    """The JSON files of a HuggingFace directory that describe its model."""

    model: Settings
    """config.json; settings that the family's reader does not read are refused."""
    generation: Mapping[str, object]
    """generation_config.json; empty if the file is missing."""


@dataclass(frozen=True, slots=True)
class Family:
    """The object that an entry of the registry points to."""

    model: type[CausalLM]
    read_config: Callable[[HfSettings], TransformerConfig]
    """Raises ModelLoadError naming a setting that is wrong or not supported."""
