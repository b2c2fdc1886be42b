"""The op table in plain PyTorch on the paged layout: correct on every device, fused on none.

cuda uses it, npu falls back to it for what its kernels do not support, and the tests of both compare with it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.common.device.fallbacks import LoopedExperts, pack_quantized
from kvferry.common.device.ops import (
    AttentionMetadata,
    Experts,
    FusedLayers,
    GatedLayer,
    LayerShape,
    Linear,
    PackedForm,
    PerHead,
)
from kvferry.common.device.paged import write_paged_tokens
from kvferry.common.device.quantize import WeightScheme


class TorchOps:
    """Implements `kvferry.common.device.ops.Ops`; stateless."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, scheme: WeightScheme | None = None) -> Linear:
        if scheme is not None:
            return pack_quantized(weight, bias, scheme)
        return lambda x: functional.linear(x, weight, bias)  # cuBLAS and its like take [out, in] unpacked

    def packed_form(self) -> PackedForm | None:
        return None

    def packed_itemsize(self, dtype: torch.dtype) -> int:
        return dtype.itemsize

    def pack_per_head(self, weight: Tensor) -> PerHead:
        return lambda x: torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def pack_experts(
        self, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], scheme: WeightScheme | None = None
    ) -> Experts:
        gate_up, down = ([self.pack_linear(weight, None, scheme) for weight in half] for half in (gate_ups, downs))
        return LoopedExperts(gate_up, down, self.silu_mul)

    def fuse_layers(self, layers: Sequence[GatedLayer], shape: LayerShape) -> FusedLayers | None:
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size] -> the same shape. Statistics in float32, as in training."""
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normalised.to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), the sum rounded to x's dtype first."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """query [T, H, D], key [T, K, D], cos and sin [T, D] float32, rounded to the query's dtype before use."""
        cos, sin = cos.to(query.dtype)[:, None], sin.to(query.dtype)[:, None]
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * F] -> silu(first half) * second half, [T, F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def kv_write(self, key: Tensor, value: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata) -> None:
        """Write key and value [T, K, D] at meta.slot_mapping."""
        for tensor, tokens in zip(cache, (key, value), strict=True):
            write_paged_tokens(tensor, meta.slot_mapping, tokens)

    def attention(
        self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float, window: int = 0
    ) -> Tensor:
        """query [T, H, D] -> [T, H * D]. Sequences with one new token are batched, longer ones computed one by one."""
        return _attend(query, _pairs(cache), meta, scale, window).flatten(1)

    def latent_write(
        self, latent: Tensor, rope_key: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata
    ) -> None:
        """Write latent [T, R] and rope_key [T, P] at meta.slot_mapping."""
        for tensor, tokens in zip(cache, (latent, rope_key), strict=True):
            write_paged_tokens(tensor, meta.slot_mapping, tokens)

    def latent_attention(
        self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float
    ) -> Tensor:
        """query [T, H, R + P] -> [T, H, R]: attention with one kv head."""
        return _attend(query, _latents(cache), meta, scale, 0)


_Read = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Block ids [..., blocks] -> keys [..., blocks, block_size, K, D] and values [..., K, V]."""


def _pairs(cache: tuple[Tensor, Tensor]) -> _Read:
    return lambda blocks: (cache[0][blocks], cache[1][blocks])


def _latents(cache: tuple[Tensor, Tensor]) -> _Read:
    def read(blocks: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope_key = cache[0][blocks].unsqueeze(-2), cache[1][blocks].unsqueeze(-2)
        return torch.cat((latent, rope_key), -1), latent

    return read


def _attend(query: Tensor, read: _Read, meta: AttentionMetadata, scale: float, window: int) -> Tensor:
    """query [T, H, D] -> [T, H, V]."""
    parts: list[tuple[list[int] | slice, Tensor]] = []
    singles, rows = [], []
    for index, (start, end) in enumerate(pairwise(meta.query_start_loc)):
        if end - start == 1:
            singles.append(index)
            rows.append(start)
        elif end > start:
            attended = _attend_chunk(query[start:end], read, meta, index, scale, window)
            parts.append((slice(start, end), attended))
    if len(rows) == query.shape[0]:
        return _attend_singles(query, read, meta, singles, scale, window)
    if rows:
        parts.append((rows, _attend_singles(query[rows], read, meta, singles, scale, window)))
    out = torch.empty(*query.shape[:2], parts[0][1].shape[-1], dtype=query.dtype, device=query.device)
    for where, attended in parts:
        out[where] = attended
    return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _attend_chunk(query: Tensor, read: _Read, meta: AttentionMetadata, index: int, scale: float, window: int) -> Tensor:
    """query [n, H, D], the last n positions of sequence `index` -> [n, H, V]."""
    new, heads, size = query.shape
    first = _first_block(meta.seq_lens[index], new, window, meta.block_size)
    length = meta.seq_lens[index] - first * meta.block_size
    blocks = meta.block_tables[index, first : first + _blocks(length, meta.block_size)].long()
    k, v = (t.flatten(0, 1)[:length].transpose(0, 1) for t in read(blocks))
    # Query heads h * G .. h * G + G - 1 share kv head h: kv heads form the batch axis, their G query heads the next.
    q = query.view(new, k.shape[0], -1, size).permute(1, 2, 0, 3)
    k, v = (t.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for t in (k, v))
    mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(length - new)
    if window:
        mask = mask.triu(length - new - window + 1)
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return attended.permute(2, 0, 1, 3).reshape(new, heads, -1)


def _attend_singles(
    query: Tensor, read: _Read, meta: AttentionMetadata, indices: Sequence[int], scale: float, window: int
) -> Tensor:
    """query [n, H, D], the newest position of each sequence in `indices` -> [n, H, V]. Pads to the longest.

    Can be recorded if `indices` are all sequences: from the host it then uses only an upper bound of the lengths.
    """
    all_of_them = len(indices) == meta.num_sequences
    tables, lengths = (t if all_of_them else t[list(indices)] for t in (meta.block_tables, meta.lengths))
    tables = tables[:, : _blocks(max(meta.seq_lens[index] for index in indices), meta.block_size)]
    ends = lengths[:, None]
    positions = torch.arange(tables.shape[1] * meta.block_size, device=query.device)
    if window:
        tables, positions = _newest_blocks(tables, ends, window, meta.block_size)
    mask = positions < ends
    if window:
        mask &= positions >= ends - window
    new, heads, size = query.shape
    # Slots beyond a sequence's end hold other sequences' old data; a mask alone does not stop a NaN from spreading.
    k, v = (t.flatten(1, 2).masked_fill_(~mask[..., None, None], 0).transpose(1, 2) for t in read(tables.long()))
    # The G query heads of one kv head take the place of query positions, so keys are read once, not G times.
    q = query.view(new, k.shape[1], -1, size)
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], scale=scale)
    return attended.reshape(new, heads, -1)


def _newest_blocks(tables: Tensor, ends: Tensor, window: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The blocks that each sequence's window reaches, the same number for all, and the positions [n, ...] in them."""
    count = min(_blocks(window - 1, block_size) + 1, tables.shape[1])
    first = (ends - window).clamp_(min=0) // block_size
    columns = first + torch.arange(count, device=tables.device)
    offsets = torch.arange(count * block_size, device=tables.device)
    # Past a sequence's last block any block will do: the mask hides positions beyond the end.
    return tables.gather(1, columns.clamp_(max=tables.shape[1] - 1)), first * block_size + offsets


def _first_block(length: int, new: int, window: int, block_size: int) -> int:
    """The block of the oldest position visible to any of the last `new` positions."""
    return max(length - new + 1 - window, 0) // block_size if window else 0


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
