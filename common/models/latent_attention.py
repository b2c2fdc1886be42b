"""Multi-head latent attention (DeepSeek): caches one latent and one rotary key per token, shared by all heads.

A head's key is its own linear map of the latent, followed by the rotary key; its value is another map of the latent.
Both maps are absorbed into the other side: the query is mapped into the latent's space and compared with the cached
latents, and the weighted latent is mapped to the head's output. Nothing is expanded per cached position.
"""

import math
from typing import Self

import torch
from torch import Tensor

from kvferry.common.device.base import KvTensorSpec
from kvferry.common.device.ops import Linear, Ops, PerHead
from kvferry.common.models.config import MlaConfig, TransformerConfig
from kvferry.common.models.loader import WeightLoader, joined
from kvferry.common.models.rope import ModelStep

_LATENT_EPS = 1e-6
"""Epsilon of the latents' norms; the configuration's epsilon applies to the other norms."""


class LatentAttention:
    """Implements `kvferry.common.models.attention.Attention`. Projections with the same input are merged."""

    def __init__(
        self, config: TransformerConfig, mla: MlaConfig, ops: Ops, latent_norm: Tensor, inputs: "LatentInputs",
        outputs: "LatentOutputs",
    ) -> None:  # fmt: skip
        self._ops = ops
        self._mla = mla
        self._heads = config.num_heads
        self._latent_norm = latent_norm
        self._inputs = inputs
        self._outputs = outputs
        self._scale = _scale(config, mla)

    @staticmethod
    def kv_specs(mla: MlaConfig, dtype: torch.dtype) -> tuple[KvTensorSpec, ...]:
        # Not sharded: every rank of a tensor-parallel node holds both, since all heads share them.
        return (
            KvTensorSpec("latent", (mla.kv_lora_rank,), dtype, None),
            KvTensorSpec("rope_key", (mla.rope_head_dim,), dtype, None),
        )

    @classmethod
    def load(cls, config: TransformerConfig, mla: MlaConfig, layer: int, loader: WeightLoader) -> Self:
        """Load this rank's heads of one layer; the weights that produce the latent are replicated on every rank."""
        prefix = f"model.layers.{layer}.self_attn."
        loader.weights.skip(prefix + "rotary_emb.inv_freq")
        latent_norm = loader.tensor(prefix + "kv_a_layernorm.weight", mla.kv_lora_rank)
        inputs = LatentInputs.load(config, mla, prefix, loader)
        outputs = LatentOutputs.load(config, mla, prefix, loader)
        return cls(config.of_rank(loader.shard), mla, loader.ops, latent_norm, inputs, outputs)

    def __call__(self, hidden: Tensor, step: ModelStep, cache: tuple[Tensor, ...]) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]."""
        ops, mla = self._ops, self._mla
        query, latent, rope_key = self._inputs(hidden)
        query = query.view(len(hidden), self._heads, -1)
        latent = ops.rms_norm(latent.contiguous(), self._latent_norm, _LATENT_EPS)
        rope_query, rotated_key = ops.rotary(query[..., mla.nope_head_dim :], rope_key[:, None], step.cos, step.sin)
        pair = (cache[0], cache[1])
        ops.latent_write(latent, rotated_key[:, 0], pair, step.meta)
        in_latent_space = torch.cat((self._outputs.to_latent(query[..., : mla.nope_head_dim]), rope_query), -1)
        return self._outputs(ops.latent_attention(in_latent_space, pair, step.meta, self._scale))


class LatentInputs:
    """hidden [T, hidden] -> query [T, heads * head_dim], latent [T, R] before its norm, rotary key [T, P]."""

    def __init__(
        self, ops: Ops, mla: MlaConfig, merged: Linear, query_norm: Tensor | None, expand: Linear | None
    ) -> None:
        """`query_norm` and `expand` map a compressed query to the heads; None if queries are not compressed."""
        self._ops = ops
        self._mla = mla
        self._merged = merged
        self._query_norm = query_norm
        self._expand = expand

    @classmethod
    def load(cls, config: TransformerConfig, mla: MlaConfig, prefix: str, loader: WeightLoader) -> Self:
        """Load and merge; moves the rows that produce rotary pairs into halves, so that rotation needs no shuffle."""
        order = _order_of_halves(mla)
        rows, heads = config.num_heads * config.head_dim, config.of_rank(loader.shard).num_heads
        compressed = mla.q_lora_rank
        name, bias = ("q_a_proj", config.attention_bias) if compressed else ("q_proj", False)
        rows_of_first = {prefix + name: compressed or rows}
        first, first_bias = loader.stacked(rows_of_first, config.hidden_size, bias, split=not compressed)
        query_norm = expand = None
        if compressed:
            query_norm = loader.tensor(prefix + "q_a_layernorm.weight", compressed)
            weight = loader.tensor(prefix + "q_b_proj.weight", rows, compressed, split=0)
            expand = loader.ops.pack_linear(_reordered(weight, heads, mla, order))
        else:
            first = _reordered(first, heads, mla, order)
        merged_rows = {prefix + "kv_a_proj_with_mqa": mla.kv_lora_rank + mla.rope_head_dim}
        second, second_bias = loader.stacked(merged_rows, config.hidden_size, config.attention_bias)
        second = _reordered_end(second, order)
        all_biases = None
        if second_bias is not None:
            none = torch.zeros(len(first), dtype=first.dtype, device=first.device)
            all_biases = joined((none if first_bias is None else first_bias, _reordered_end(second_bias, order)))
        return cls(loader.ops, mla, loader.ops.pack_linear(joined((first, second)), all_biases), query_norm, expand)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mla = self._mla
        merged = self._merged(hidden)
        rope_start = merged.shape[1] - mla.rope_head_dim
        query, latent = (
            merged[:, : rope_start - mla.kv_lora_rank],
            merged[:, rope_start - mla.kv_lora_rank : rope_start],
        )
        if self._query_norm is not None and self._expand is not None:
            query = self._expand(self._ops.rms_norm(query.contiguous(), self._query_norm, _LATENT_EPS))
        else:
            query = query.contiguous()
        return query, latent, merged[:, rope_start:]


class LatentOutputs:
    """The maps between a head's space and the latent's, and the output projection."""

    def __init__(self, to_latent: PerHead, from_latent: PerHead, output: Linear) -> None:
        """to_latent: [T, H, nope] -> [T, H, R]; from_latent: [T, H, R] -> [T, H, V]."""
        self.to_latent = to_latent
        self._from_latent = from_latent
        self._output = output

    @classmethod
    def load(cls, config: TransformerConfig, mla: MlaConfig, prefix: str, loader: WeightLoader) -> Self:
        # Both maps are parts of one tensor.
        per_head = mla.nope_head_dim + mla.v_head_dim
        both = loader.tensor(prefix + "kv_b_proj.weight", config.num_heads * per_head, mla.kv_lora_rank, split=0)
        both = both.view(config.of_rank(loader.shard).num_heads, per_head, mla.kv_lora_rank)
        size = config.num_heads * mla.v_head_dim
        return cls(
            loader.ops.pack_per_head(both[:, : mla.nope_head_dim].contiguous()),
            loader.ops.pack_per_head(both[:, mla.nope_head_dim :].transpose(1, 2).contiguous()),
            loader.summed(loader.partial_linear(prefix + "o_proj", config.hidden_size, size, config.output_bias)),
        )

    def __call__(self, attended: Tensor) -> Tensor:
        """[T, H, R] -> [T, hidden]."""
        return self._output(self._from_latent(attended).flatten(1))


def _scale(config: TransformerConfig, mla: MlaConfig) -> float:
    scale: float = (mla.nope_head_dim + mla.rope_head_dim) ** -0.5
    rope = config.rope
    stretched = rope.type == "yarn" and rope.factor > 1
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2 if stretched else scale


def _order_of_halves(mla: MlaConfig) -> Tensor:
    """[P] permutation of the checkpoint's rows that puts the first element of each pair into the first half."""
    order = torch.arange(mla.rope_head_dim)
    return order.view(-1, 2).t().reshape(-1) if mla.interleaved else order


def _reordered(weight: Tensor, heads: int, mla: MlaConfig, order: Tensor) -> Tensor:
    """weight [heads * (nope + P), in] with the last P rows of each head permuted by `order`."""
    by_head = weight.view(heads, mla.nope_head_dim + mla.rope_head_dim, -1)
    return _reordered_end(by_head.transpose(0, 1), order).transpose(0, 1).reshape(weight.shape)


def _reordered_end(rows: Tensor, order: Tensor) -> Tensor:
    """`rows` with the last len(order) rows permuted by `order`."""
    end = len(rows) - len(order)
    return torch.cat((rows[:end], rows[end:].index_select(0, order.to(rows.device))))
