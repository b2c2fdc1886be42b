"""A decoder whose layers are attention and MLP, each preceded by a norm: the body of every supported family.

The configuration selects the differences between families: biases, head norms, windows, experts, latent attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvferry.common.device.base import Device, KvTensorSpec
from kvferry.common.device.ops import AttentionMetadata, FusedLayers, GatedLayer, LayerShape, Linear, Ops
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.models.attention import Attention, GroupedAttention
from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.family import LayerDone
from kvferry.common.models.latent_attention import LatentAttention
from kvferry.common.models.loader import WeightLoader
from kvferry.common.models.mlp import GatedMlp, Mlp, load_mlp
from kvferry.common.models.moe import MoeMlp
from kvferry.common.models.rope import ModelStep, cos_sin, inverse_frequencies
from kvferry.common.models.weights import ROPE_FACTORS, TrackedWeights
from kvferry.common.parallel.collectives import ALONE, Collectives
from kvferry.common.parallel.shard import WHOLE, Shard
from kvferry.common.parallel.vocabulary import VocabularyEmbedding, VocabularyHead


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer with its weights."""

    input_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: Mlp


class DecoderModel:
    """Implements `kvferry.common.models.family.CausalLM`."""

    def __init__(
        self,
        config: TransformerConfig,
        ops: Ops,
        embedding: VocabularyEmbedding,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        head: VocabularyHead,
        frequencies: Tensor,
        shard: Shard = WHOLE,
    ) -> None:
        self.config = config
        self.kv_specs: tuple[KvTensorSpec, ...] = _kv_specs(config.of_rank(shard), final_norm.dtype)
        self._ops = ops
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        self._frequencies = frequencies
        # Fused layers cannot stop for the reductions between ranks.
        self._fused = _fuse(config, ops, self._layers) if shard.is_whole else None

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
        """Take every weight, or this rank's part, merge, convert and pack. Raises ModelLoadError for a missing weight
        and for a size that cannot be divided among the ranks."""
        config.check_divisible(collectives.shard)
        loader = WeightLoader(weights, device, dtype, collectives, scheme)
        rows = loader.vocabulary("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [_load_layer(config, index, loader) for index in range(config.num_layers)]
        for extra in range(config.num_layers, config.num_layers + config.extra_layers):
            weights.skip_below(f"model.layers.{extra}.")
        return cls(
            config,
            device.ops,
            VocabularyEmbedding(rows, collectives),
            layers,
            loader.tensor("model.norm.weight", config.hidden_size),
            VocabularyHead(_load_head(config, rows, loader), config.vocab_size, collectives),
            _load_frequencies(config, weights).to(device.torch_device),
            collectives.shard,
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[tuple[Tensor, ...]],
        meta: AttentionMetadata,
        on_layer: LayerDone | None = None,
    ) -> Tensor:
        """token_ids and positions [T] int64 -> hidden states [T, hidden] before the final norm."""
        ops, eps = self._ops, self.config.rms_norm_eps
        step = ModelStep(*cos_sin(positions, self._frequencies, self.config.rope.attention_factor), meta)
        residual = self._embedding(token_ids)
        if self._fused is not None:
            return residual.add_(self._fused(residual, step.cos, step.sin, meta, caches, on_layer))
        # Every input norm but the first is fused with the residual addition before it.
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            if index:
                hidden, residual = ops.add_rms_norm(hidden, residual, layer.input_norm, eps)
            hidden = layer.attention(hidden, step, caches[index])
            if on_layer is not None:
                on_layer(index + 1)
            hidden, residual = ops.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = layer.mlp(hidden)
        return hidden + residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab] float32."""
        return self._head(self._ops.rms_norm(hidden, self._final_norm, self.config.rms_norm_eps)).float()


def _fuse(config: TransformerConfig, ops: Ops, layers: Sequence[DecoderLayer]) -> FusedLayers | None:
    """All layers as one callable; None if a layer is not plain (grouped attention, gated MLP) or the ops cannot."""
    described = []
    for layer in layers:
        attention, mlp = layer.attention, layer.mlp
        if not (isinstance(attention, GroupedAttention) and isinstance(mlp, GatedMlp)):
            return None
        described.append(
            GatedLayer(
                layer.input_norm, attention.qkv, attention.norms, attention.window, attention.output, layer.mlp_norm,
                mlp.gate_up, mlp.down,
            )
        )  # fmt: skip
    shape = LayerShape(
        config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.head_dim**-0.5
    )
    return ops.fuse_layers(described, shape)


def _load_layer(config: TransformerConfig, index: int, loader: WeightLoader) -> DecoderLayer:
    prefix = f"model.layers.{index}."
    return DecoderLayer(
        input_norm=loader.tensor(prefix + "input_layernorm.weight", config.hidden_size),
        attention=_load_attention(config, index, loader),
        mlp_norm=loader.tensor(prefix + "post_attention_layernorm.weight", config.hidden_size),
        mlp=_load_mlp(config, index, prefix + "mlp.", loader),
    )


def _load_attention(config: TransformerConfig, index: int, loader: WeightLoader) -> Attention:
    if config.mla is not None:
        return LatentAttention.load(config, config.mla, index, loader)
    return GroupedAttention.load(config, index, loader)


def _kv_specs(config: TransformerConfig, dtype: torch.dtype) -> tuple[KvTensorSpec, ...]:
    if config.mla is not None:
        return LatentAttention.kv_specs(config.mla, dtype)
    return GroupedAttention.kv_specs(config, dtype)


def _load_mlp(config: TransformerConfig, index: int, prefix: str, loader: WeightLoader) -> Mlp:
    if config.moe is not None and index in config.moe.layers:
        return MoeMlp.load(prefix, config.hidden_size, config.moe, config.mlp_bias, loader)
    return load_mlp(prefix, config.hidden_size, config.intermediate_size, config.mlp_bias, loader)


def _load_head(config: TransformerConfig, embedding: Tensor, loader: WeightLoader) -> Linear:
    """This rank's rows of the head. If tied, the embedding's, whether or not the checkpoint contains a copy."""
    if config.tie_word_embeddings:
        loader.weights.skip("lm_head.weight")
        return loader.packed(
            ["lm_head.weight"], (len(embedding), config.hidden_size), lambda: embedding, None, loader.head_scheme
        )
    return loader.packed(
        ["lm_head.weight"], (len(embedding), config.hidden_size),
        lambda: loader.vocabulary("lm_head.weight", config.vocab_size, config.hidden_size), None, loader.head_scheme,
    )  # fmt: skip


def _load_frequencies(config: TransformerConfig, weights: TrackedWeights) -> Tensor:
    size = config.rotated_size
    factors = weights.take(ROPE_FACTORS, (size // 2,)) if weights.has(ROPE_FACTORS) else None
    return inverse_frequencies(config.rope, size, factors)
