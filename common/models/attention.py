"""Grouped-query attention: fewer key-value heads than query heads; keys are cached after rotation."""

from typing import Protocol, Self

import torch
from torch import Tensor

from kvferry.common.device.base import KvTensorSpec
from kvferry.common.device.ops import Linear, Ops
from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.loader import WeightLoader
from kvferry.common.models.rope import ModelStep


class Attention(Protocol):
    """Attention of one layer."""

    def __call__(self, hidden: Tensor, step: ModelStep, cache: tuple[Tensor, ...]) -> Tensor:
        """Normalised hidden [T, hidden] -> [T, hidden]; first writes the tokens' cache entries."""
        ...


class GroupedAttention:
    """Implements Attention. Query, key and value projections are merged."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        ops: Ops,
        qkv: Linear,
        output: Linear,
        norms: tuple[Tensor, Tensor] | None,
    ) -> None:
        """`config` has this rank's head counts. `norms`: weights [head_dim] of the query and key norms, if any."""
        self._ops = ops
        self.qkv = qkv
        self.output = output
        self.norms = norms
        self._eps = config.rms_norm_eps
        self._heads, self._kv_heads, self._size = config.num_heads, config.num_kv_heads, config.head_dim
        self._scale = config.head_dim**-0.5
        self.window = config.window(layer)

    @staticmethod
    def kv_specs(config: TransformerConfig, dtype: torch.dtype) -> tuple[KvTensorSpec, ...]:
        shape = (config.num_kv_heads, config.head_dim)
        return KvTensorSpec("key", shape, dtype), KvTensorSpec("value", shape, dtype)

    @classmethod
    def load(cls, config: TransformerConfig, layer: int, loader: WeightLoader) -> Self:
        """Load this rank's heads of one layer."""
        prefix = f"model.layers.{layer}.self_attn."
        local = config.of_rank(loader.shard)
        query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        loader.weights.skip(prefix + "rotary_emb.inv_freq")
        merged = {prefix + "q_proj": query, prefix + "k_proj": key_value, prefix + "v_proj": key_value}
        norms = None
        if config.qk_norm:
            query_norm = loader.tensor(prefix + "q_norm.weight", config.head_dim)
            norms = query_norm, loader.tensor(prefix + "k_norm.weight", config.head_dim)
        return cls(
            local,
            layer,
            loader.ops,
            loader.linear(merged, config.hidden_size, config.attention_bias, split=True),
            loader.summed(loader.partial_linear(prefix + "o_proj", config.hidden_size, query, config.output_bias)),
            norms,
        )

    def __call__(self, hidden: Tensor, step: ModelStep, cache: tuple[Tensor, ...]) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]."""
        ops, heads, both = self._ops, self._heads, self._heads + self._kv_heads
        qkv = self.qkv(hidden).view(-1, both + self._kv_heads, self._size)
        query, key = qkv[:, :heads], qkv[:, heads:both]
        if self.norms is not None:
            query = ops.rms_norm(query.contiguous(), self.norms[0], self._eps)
            key = ops.rms_norm(key.contiguous(), self.norms[1], self._eps)
        query, key = ops.rotary(query, key, step.cos, step.sin)
        pair = (cache[0], cache[1])
        ops.kv_write(key, qkv[:, both:], pair, step.meta)
        return self.output(ops.attention(query, pair, step.meta, self._scale, self.window))
