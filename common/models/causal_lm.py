"""What the engine asks of a model family, as a type. A family implements it in one file and enters the registry."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from kvferry.common.device.base import AttentionMetadata, Device, KvTensorSpec
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.weights import TrackedWeights
from kvferry.common.parallel.collectives import ALONE, Collectives

LayerDone = Callable[[int], None]
"""Called with the number of layers whose kernels have been started so far: 1, 2, ..."""


class CausalLM(Protocol):
    """A decoder with weights on one device. T tokens of a ragged batch, laid end to end."""

    config: TransformerConfig
    kv_specs: tuple[KvTensorSpec, ...]
    """One layer's cache tensors on this rank; every layer has the same."""

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
        """token_ids and positions [T] int64, caches one tuple a layer -> hidden states [T, hidden], not normalised."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] of the positions that are sampled -> [n, vocab] float32."""
        ...
