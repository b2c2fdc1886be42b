"""The ops of a model step in plain PyTorch on the paged layout. Right on every device, fused on none.

cuda runs on them, npu falls back to them for what its kernels do not take, and the tests of both compare with them.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from common.device.base import AttentionMetadata, Linear
from common.device.paged import write_paged_tokens


class TorchOps:
    """Implements `common.device.base.Ops`; stateless."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The library's own matmul takes [out, in] weights as they are."""
        return lambda x: functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, hidden] -> the same shape. Statistics in float32, as the checkpoints were trained."""
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

    def attention(self, query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, scale: float) -> Tensor:
        """query [T, H, D] -> [T, H * D]. Sequences with one new token go together, longer ones one by one."""
        out = torch.empty_like(query)
        singles, rows = [], []
        for index, (start, end) in enumerate(pairwise(meta.query_start_loc)):
            if end - start == 1:
                singles.append(index)
                rows.append(start)
            elif end > start:
                out[start:end] = _attend_chunk(query[start:end], cache, meta, index, scale)
        if len(rows) == query.shape[0]:
            out = _attend_singles(query, cache, meta, singles, scale)
        elif rows:
            out[rows] = _attend_singles(query[rows], cache, meta, singles, scale)
        return out.flatten(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _attend_chunk(
    query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, index: int, scale: float
) -> Tensor:
    """query [n, H, D], the last n positions of sequence `index` -> [n, H, D]."""
    length = meta.seq_lens[index]
    table = meta.block_tables[index, : _blocks(length, meta.block_size)].long()
    new, heads, size = query.shape
    kv_heads = cache[0].shape[2]
    # Query heads h * G .. h * G + G - 1 share kv head h: kv heads as the batch, their G query heads beside it.
    q = query.view(new, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
    k, v = (t[table].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1) for t in cache)
    mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(length - new)
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return attended.permute(2, 0, 1, 3).reshape(new, heads, size)


def _attend_singles(
    query: Tensor, cache: tuple[Tensor, Tensor], meta: AttentionMetadata, indices: Sequence[int], scale: float
) -> Tensor:
    """query [n, H, D], the newest position of each sequence in `indices` -> [n, H, D]. Pads to the longest."""
    lengths = [meta.seq_lens[index] for index in indices]
    tables = meta.block_tables if len(indices) == meta.num_sequences else meta.block_tables[list(indices)]
    tables = tables[:, : _blocks(max(lengths), meta.block_size)].long()
    new, heads, size = query.shape
    kv_heads = cache[0].shape[2]
    # The G query heads of one kv head stand where the query positions would: keys are read once, not G times.
    q = query.view(new, kv_heads, heads // kv_heads, size)
    positions = torch.arange(tables.shape[1] * meta.block_size, device=query.device)
    mask = positions < torch.tensor(lengths, device=query.device)[:, None]
    # What lies beyond a sequence's end is another's old data. A mask alone does not keep a NaN there from spreading.
    k, v = (t[tables].flatten(1, 2).masked_fill_(~mask[..., None, None], 0).transpose(1, 2) for t in cache)
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], scale=scale)
    return attended.reshape(new, heads, size)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
