"""Paged attention of ragged batches on a CPU, in plain torch. Knows the layout [num_blocks, kv_heads, block_size, D].

What depends on the batch alone (indices, masks, grouping) is worked out once a step in an `AttentionPlan` and used by
every layer. Sequences with one new token are gathered together by similar length; a longer chunk goes alone, in blocks
of rows so that little is computed above the diagonal.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from common.device.base import AttentionMetadata

_GROUP_RATIO = 0.5
"""A decode group's shortest sequence has at least this share of its longest one's tokens: bounds the padding."""
_GROUP_TOKENS = 1 << 16
"""Padded tokens gathered at once; bounds the temporary memory of a layer."""
_SDPA_ROWS = 256
_BMM_ROWS = 128


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of one new token each; n of them, padded to `length` keys."""

    rows: Tensor
    """[n] token rows of the step."""
    row_list: tuple[int, ...]
    lengths: tuple[int, ...]
    length: int
    gather: Tensor
    """[n * kv_heads * blocks] rows of the cache seen as [num_blocks * kv_heads, block_size * D]."""
    mask: Tensor | None
    """[n, 1, 1, length] float32, 0 or -inf; None when nothing is padded."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence of several new tokens, at the end of `length` keys."""

    start: int
    end: int
    length: int
    gather: Tensor
    """[kv_heads * blocks], as in DecodeGroup."""
    mask: Tensor
    """[rows of a block, length] float32: the causal triangle at the right end. A block of r rows and e keys uses its
    last r rows and last e columns."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's batch, laid out for `attend` and `write`."""

    meta: AttentionMetadata
    write_rows: Tensor
    """[T * kv_heads] rows of the cache seen as [num_blocks * kv_heads * block_size, D]."""
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]
    all_decode: bool
    """One group that covers the step's rows in order: no row has to be picked."""


def make_plan(meta: AttentionMetadata, kv_heads: int, wide_rows: bool) -> AttentionPlan:
    """Everything about `meta` that does not depend on the layer. `wide_rows`: block size for SDPA, else for bmm."""
    tables = meta.block_tables.long()
    singles, chunks = [], []
    for index, (start, end) in enumerate(pairwise(meta.query_start_loc)):
        if end - start == 1:
            singles.append((meta.seq_lens[index], index, start))
        elif end > start:
            rows = _SDPA_ROWS if wide_rows else _BMM_ROWS
            chunks.append(_plan_chunk(start, end, index, tables, meta, kv_heads, rows))
    groups = tuple(_plan_group(members, tables, meta.block_size, kv_heads) for members in _split_by_length(singles))
    in_order = len(groups) == 1 and not chunks and groups[0].row_list == tuple(range(len(singles)))
    return AttentionPlan(meta, _write_rows(meta, kv_heads), groups, tuple(chunks), in_order)


def write(plan: AttentionPlan, cache: Tensor, tokens: Tensor) -> None:
    """Put tokens [T, kv_heads, D] into one cache tensor."""
    cache.view(-1, cache.shape[-1]).index_copy_(0, plan.write_rows, tokens.reshape(-1, cache.shape[-1]))


def attend(
    plan: AttentionPlan, query: Tensor, cache: tuple[Tensor, Tensor], scale: float, compute_dtype: torch.dtype
) -> Tensor:
    """query [T, H, D] -> [T, H * D] of the query's dtype; matmuls in `compute_dtype`, softmax in float32."""
    if plan.all_decode:
        return _attend_group(plan.groups[0], query, cache, scale, compute_dtype).to(query.dtype).flatten(1)
    out = torch.empty(query.shape, dtype=query.dtype)
    for group in plan.groups:
        out[group.rows] = _attend_group(group, query[group.rows], cache, scale, compute_dtype).to(out.dtype)
    for chunk in plan.chunks:
        _attend_chunk(chunk, query[chunk.start : chunk.end], cache, scale, compute_dtype, out[chunk.start : chunk.end])
    return out.flatten(1)


def _split_by_length(singles: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """(length, sequence, row) triples in groups of similar length; each group in the order of its rows."""
    groups: list[list[tuple[int, int, int]]] = []
    longest = 0
    for single in sorted(singles, reverse=True):
        full = bool(groups) and (len(groups[-1]) + 1) * longest > _GROUP_TOKENS
        if not groups or full or single[0] < longest * _GROUP_RATIO:
            groups.append([])
            longest = single[0]
        groups[-1].append(single)
    return [sorted(group, key=lambda single: single[2]) for group in groups]


def _plan_group(members: list[tuple[int, int, int]], tables: Tensor, block_size: int, kv_heads: int) -> DecodeGroup:
    lengths = tuple(length for length, _, _ in members)
    row_list = tuple(row for _, _, row in members)
    longest = max(lengths)
    own = tables[torch.tensor([index for _, index, _ in members]), : -(-longest // block_size)]
    heads = torch.arange(kv_heads)[None, :, None]
    gather = (own[:, None, :] * kv_heads + heads).reshape(-1)
    mask = None
    if min(lengths) < longest:
        beyond = torch.arange(longest)[None, :] >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(len(members), 1, 1, longest).masked_fill_(beyond[:, None, None], -math.inf)
    return DecodeGroup(torch.tensor(row_list), row_list, lengths, longest, gather, mask)


def _plan_chunk(
    start: int, end: int, index: int, tables: Tensor, meta: AttentionMetadata, kv_heads: int, rows: int
) -> PrefillChunk:
    length = meta.seq_lens[index]
    own = tables[index, : -(-length // meta.block_size)]
    gather = (own[None, :] * kv_heads + torch.arange(kv_heads)[:, None]).reshape(-1)
    rows = min(rows, end - start)
    mask = torch.full((rows, length), -math.inf).triu_(length - rows + 1)
    return PrefillChunk(start, end, length, gather, mask)


def _write_rows(meta: AttentionMetadata, kv_heads: int) -> Tensor:
    blocks, offsets = meta.slot_mapping // meta.block_size, meta.slot_mapping % meta.block_size
    return ((blocks[:, None] * kv_heads + torch.arange(kv_heads)) * meta.block_size + offsets[:, None]).reshape(-1)


def _gather(cache: Tensor, rows: Tensor, sequences: int, dtype: torch.dtype) -> Tensor:
    """[sequences, kv_heads, blocks * block_size, D] in `dtype`, from whole blocks of one head each."""
    _, kv_heads, block_size, size = cache.shape
    picked = cache.view(-1, block_size * size).index_select(0, rows)
    return picked.view(sequences, kv_heads, -1, size).to(dtype)


def _attend_group(
    group: DecodeGroup, query: Tensor, cache: tuple[Tensor, Tensor], scale: float, dtype: torch.dtype
) -> Tensor:
    """query [n, H, D] -> [n, H, D] in `dtype`."""
    count, heads, size = query.shape
    kv_heads = cache[0].shape[1]
    keys, values = (_gather(tensor, group.gather, count, dtype)[:, :, : group.length] for tensor in cache)
    # The query heads of one kv head are the rows of one matmul: keys are read once for all of them.
    folded = (query.to(dtype) * scale).view(count, kv_heads, heads // kv_heads, size)
    scores = torch.matmul(folded, keys.transpose(2, 3)).float()
    if group.mask is not None:
        scores += group.mask
    out = torch.matmul(scores.softmax(-1).to(dtype), values).view(count, heads, size)
    if group.mask is not None and not math.isfinite(out.sum().item()):
        return _attend_apart(group, folded, keys, values, out)
    return out


def _attend_apart(group: DecodeGroup, folded: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """The same, each sequence over exactly its own keys.

    Padding reads slots that belong to nobody or to others. Their weight is zero, but zero times a not-a-number left
    there by a sequence that failed is not zero; then nothing padded may be read.
    """
    for row, length in enumerate(group.lengths):
        scores = torch.matmul(folded[row], keys[row, :, :length].transpose(1, 2)).float()
        attended = torch.matmul(scores.softmax(-1).to(values.dtype), values[row, :, :length])
        out[row] = attended.view(out.shape[1:])
    return out


def _attend_chunk(
    chunk: PrefillChunk, query: Tensor, cache: tuple[Tensor, Tensor], scale: float, dtype: torch.dtype, out: Tensor
) -> None:
    """query [n, H, D] into out [n, H, D]; row block by row block, each over the keys up to its own end."""
    keys, values = (_gather(tensor, chunk.gather, 1, dtype)[0, :, : chunk.length] for tensor in cache)
    new, rows = query.shape[0], chunk.mask.shape[0]
    wide = query.to(dtype).transpose(0, 1)
    for begin in range(0, new, rows):
        end = min(begin + rows, new)
        visible = chunk.length - new + end
        mask = chunk.mask[rows - (end - begin) :, chunk.length - visible :]
        block = wide[:, begin:end], keys[:, :visible], values[:, :visible]
        attended = _sdpa_block(*block, mask, scale) if dtype == torch.float32 else _bmm_block(*block, mask, scale)
        out[begin:end] = attended.transpose(0, 1)


def _sdpa_block(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query [H, r, D], keys and values [K, e, D], mask [r, e] -> [H, r, D]. Torch's flash kernel: best in float32."""
    attended = functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return attended[0]


def _bmm_block(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same with plain matmuls, twice as fast as the flash kernel where bfloat16 has instructions of its own."""
    heads, rows, size = query.shape
    kv_heads, visible, _ = keys.shape
    folded = (query * scale).reshape(kv_heads, heads // kv_heads * rows, size)
    scores = torch.bmm(folded, keys.transpose(1, 2)).float()
    scores.view(kv_heads, -1, rows, visible)[..., visible - rows :] += mask[:, visible - rows :]
    return torch.bmm(scores.softmax(-1).to(values.dtype), values).view(heads, rows, size)
