"""Paged attention of ragged batches on a CPU, in plain torch. Knows the layout [num_blocks, kv_heads, block_size, D].

Everything that depends on the batch alone (indices, masks, grouping) is computed once per step as a `BatchLayout` and
shared by all layers with the same window. Sequences with one new token are grouped by similar length; a longer chunk
is computed alone, in blocks of rows so that little is computed above the diagonal. With a sliding window, lengths and
indices count from the first visible block. Latent attention is the case of one head whose key is the latent and the
rotary key concatenated and whose value is the latent.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.common.device.ops import AttentionMetadata

_GROUP_RATIO = 0.5
"""Lower bound of shortest / longest sequence within a decode group: limits the padding."""
_GROUP_TOKENS = 1 << 16
"""Padded tokens per gather; limits the temporary memory of a layer."""
SDPA_ROWS = 256
"""Rows of a prefill block for torch's flash kernel (float32); BMM_ROWS is for plain matmuls (other dtypes)."""
BMM_ROWS = 128


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """n sequences with one new token each, padded to `length` keys."""

    rows: Tensor
    """[n] token rows of the step."""
    row_list: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """The visible keys [start, end) of each sequence."""
    length: int
    gather: Tensor
    """[n * kv_heads * blocks] rows of the cache viewed as [num_blocks * kv_heads, block_size * D]."""
    mask: Tensor | None
    """[n, 1, 1, length] float32, 0 or -inf; None if every sequence sees all keys."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence with several new tokens, the last of `length` keys."""

    start: int
    end: int
    length: int
    gather: Tensor
    """[kv_heads * blocks], as in DecodeGroup."""
    mask: Tensor
    """[rows of a block, length] float32: the causal triangle, or the window's band, right-aligned. A block with r rows
    and e keys uses the last r rows and the last e columns."""
    window: int
    """0: none."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """A step's batch as `attend` reads it."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]
    all_decode: bool
    """One group covers the step's rows in order, so no rows need to be selected."""


def lay_out(meta: AttentionMetadata, kv_heads: int, rows: int, window: int = 0) -> BatchLayout:
    """Everything derived from `meta` that no layer changes. `rows`: maximum rows of a prefill block."""
    tables = meta.block_tables.long()
    singles, chunks = [], []
    for index, (start, end) in enumerate(pairwise(meta.query_start_loc)):
        if end - start == 1:
            first = _first_block(meta.seq_lens[index], 1, window, meta.block_size)
            singles.append(_Single(meta.seq_lens[index] - first * meta.block_size, first, index, start))
        elif end > start:
            chunks.append(_chunk(start, end, index, tables, meta, kv_heads, min(rows, end - start), window))
    groups = tuple(_group(group, tables, meta.block_size, kv_heads, window) for group in _split_by_length(singles))
    in_order = len(groups) == 1 and not chunks and groups[0].row_list == tuple(range(len(singles)))
    return BatchLayout(groups, tuple(chunks), in_order)


def write_rows(meta: AttentionMetadata, kv_heads: int) -> Tensor:
    """[T * kv_heads] rows of this step's tokens in a cache viewed as [num_blocks * kv_heads * block_size, D]."""
    blocks, offsets = meta.slot_mapping // meta.block_size, meta.slot_mapping % meta.block_size
    return ((blocks[:, None] * kv_heads + torch.arange(kv_heads)) * meta.block_size + offsets[:, None]).reshape(-1)


def write(rows: Tensor, cache: Tensor, tokens: Tensor) -> None:
    """Write tokens [T, kv_heads, D] into one cache tensor at `write_rows`."""
    cache.view(-1, cache.shape[-1]).index_copy_(0, rows, tokens.reshape(-1, cache.shape[-1]))


def attend(
    layout: BatchLayout,
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    scale: float,
    compute_dtype: torch.dtype,
    latent: bool = False,
) -> Tensor:
    """query [T, H, D] -> [T, H * V] in the query's dtype; matmuls in `compute_dtype`, softmax in float32.

    `cache`: keys and values; with `latent`, the latents and the rotary keys, one head each.
    """
    read = _Reader(cache, compute_dtype, latent)
    if layout.all_decode:
        return _attend_group(layout.groups[0], query, read, scale).to(query.dtype).flatten(1)
    out = query.new_empty(*query.shape[:2], read.value_size)
    for group in layout.groups:
        out[group.rows] = _attend_group(group, query[group.rows], read, scale).to(out.dtype)
    for chunk in layout.chunks:
        _attend_chunk(chunk, query[chunk.start : chunk.end], read, scale, out[chunk.start : chunk.end])
    return out.flatten(1)


class _Single(NamedTuple):
    """A sequence with one new token, ordered by its length counted from its first visible block."""

    length: int
    first_block: int
    sequence: int
    row: int


def _first_block(length: int, new: int, window: int, block_size: int) -> int:
    """The block of the oldest position visible to any of the last `new` positions."""
    return max(length - new + 1 - window, 0) // block_size if window else 0


def _split_by_length(singles: list[_Single]) -> list[list[_Single]]:
    """Groups of similar length, each sorted by row."""
    groups: list[list[_Single]] = []
    longest = 0
    for single in sorted(singles, reverse=True):
        full = bool(groups) and (len(groups[-1]) + 1) * longest > _GROUP_TOKENS
        if not groups or full or single.length < longest * _GROUP_RATIO:
            groups.append([])
            longest = single.length
        groups[-1].append(single)
    return [sorted(group, key=lambda single: single.row) for group in groups]


def _group(members: list[_Single], tables: Tensor, block_size: int, kv_heads: int, window: int) -> DecodeGroup:
    longest = max(member.length for member in members)
    firsts = torch.tensor([member.first_block for member in members])
    columns = firsts[:, None] + torch.arange(-(-longest // block_size))
    # Shorter sequences are padded with arbitrary blocks; the mask hides their contents.
    own = tables[torch.tensor([member.sequence for member in members])].gather(
        1, columns.clamp_(max=tables.shape[1] - 1)
    )
    gather = (own[:, None, :] * kv_heads + torch.arange(kv_heads)[None, :, None]).reshape(-1)
    spans = tuple((max(member.length - window, 0) if window else 0, member.length) for member in members)
    mask = None
    if any(span != (0, longest) for span in spans):
        positions, limits = torch.arange(longest), torch.tensor(spans)
        unseen = (positions < limits[:, :1]) | (positions >= limits[:, 1:])
        mask = torch.zeros(len(members), 1, 1, longest).masked_fill_(unseen[:, None, None], -math.inf)
    row_list = tuple(member.row for member in members)
    return DecodeGroup(torch.tensor(row_list), row_list, spans, longest, gather, mask)


def _chunk(
    start: int, end: int, index: int, tables: Tensor, meta: AttentionMetadata, kv_heads: int, rows: int, window: int
) -> PrefillChunk:
    last = -(-meta.seq_lens[index] // meta.block_size)
    first = _first_block(meta.seq_lens[index], end - start, window, meta.block_size)
    length = meta.seq_lens[index] - first * meta.block_size
    gather = (tables[index, first:last][None, :] * kv_heads + torch.arange(kv_heads)[:, None]).reshape(-1)
    mask = torch.full((rows, length), -math.inf).triu_(length - rows + 1)
    if window:
        mask += torch.full((rows, length), -math.inf).tril_(length - rows - window)
    return PrefillChunk(start, end, length, gather, mask, window)


class _Reader:
    """Gathers keys and values from the cache by row."""

    def __init__(self, cache: tuple[Tensor, Tensor], dtype: torch.dtype, latent: bool) -> None:
        self._cache = cache
        self._latent = latent
        self.dtype = dtype
        self.flash = dtype == torch.float32 and not latent
        """Whether torch's flash kernel is the fastest path; it requires keys and values of equal size."""
        self.kv_heads = cache[0].shape[1]
        self.value_size = cache[0 if latent else 1].shape[-1]

    def __call__(self, rows: Tensor, sequences: int, length: int) -> tuple[Tensor, Tensor]:
        """[sequences, kv_heads, length, D] and [..., V], read in whole blocks of one head."""
        first, second = (self._gather(tensor, rows, sequences)[:, :, :length] for tensor in self._cache)
        return (torch.cat((first, second), -1), first) if self._latent else (first, second)

    def _gather(self, cache: Tensor, rows: Tensor, sequences: int) -> Tensor:
        _, kv_heads, block_size, size = cache.shape
        picked = cache.view(-1, block_size * size).index_select(0, rows)
        return picked.view(sequences, kv_heads, -1, size).to(self.dtype)


def _attend_group(group: DecodeGroup, query: Tensor, read: _Reader, scale: float) -> Tensor:
    """query [n, H, D] -> [n, H, V] in the reader's dtype."""
    count, heads, size = query.shape
    keys, values = read(group.gather, count, group.length)
    # The query heads of one kv head form the rows of one matmul, so keys are read once per kv head.
    folded = (query.to(read.dtype) * scale).view(count, read.kv_heads, heads // read.kv_heads, size)
    scores = torch.matmul(folded, keys.transpose(2, 3)).float()
    if group.mask is not None:
        scores += group.mask
    out = torch.matmul(scores.softmax(-1).to(read.dtype), values).view(count, heads, read.value_size)
    if group.mask is not None and not math.isfinite(out.sum().item()):
        return _attend_apart(group, folded, keys, values, out)
    return out


def _attend_apart(group: DecodeGroup, folded: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """As `_attend_group`, each sequence over exactly its own keys.

    Padding reads slots of free blocks or of other sequences. Their weight is zero, but zero times a NaN that a failed
    sequence left there is NaN; in that case no padding may be read.
    """
    for row, (start, end) in enumerate(group.spans):
        scores = torch.matmul(folded[row], keys[row, :, start:end].transpose(1, 2)).float()
        attended = torch.matmul(scores.softmax(-1).to(values.dtype), values[row, :, start:end])
        out[row] = attended.view(out.shape[1:])
    return out


def _attend_chunk(chunk: PrefillChunk, query: Tensor, read: _Reader, scale: float, out: Tensor) -> None:
    """query [n, H, D] into out [n, H, V], in blocks of rows, each over the keys up to its last row."""
    keys, values = (tensor[0] for tensor in read(chunk.gather, 1, chunk.length))
    new, rows = query.shape[0], chunk.mask.shape[0]
    wide = query.to(read.dtype).transpose(0, 1)
    for begin in range(0, new, rows):
        end = min(begin + rows, new)
        visible = chunk.length - new + end
        first = max(visible - (end - begin) + 1 - chunk.window, 0) if chunk.window else 0
        mask = chunk.mask[rows - (end - begin) :, chunk.length - visible + first :]
        block = wide[:, begin:end], keys[:, first:visible], values[:, first:visible]
        if read.flash:
            attended = _sdpa_block(*block, mask, scale)
        else:
            attended = _bmm_block(*block, mask, scale, masked=visible if chunk.window else end - begin)
        out[begin:end] = attended.transpose(0, 1)


def _sdpa_block(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query [H, r, D], keys and values [K, e, D], mask [r, e] -> [H, r, D] by torch's flash kernel, best in float32."""
    attended = functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return attended[0]


def _bmm_block(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, masked: int) -> Tensor:
    """As `_sdpa_block` with plain matmuls: twice as fast as the flash kernel on CPUs with bfloat16 instructions.

    Only the last `masked` columns of the mask have non-zero entries.
    """
    heads, rows, size = query.shape
    kv_heads, seen, _ = keys.shape
    folded = (query * scale).reshape(kv_heads, heads // kv_heads * rows, size)
    scores = torch.bmm(folded, keys.transpose(1, 2)).float()
    begin = max(seen - masked, 0)
    scores.view(kv_heads, -1, rows, seen)[..., begin:] += mask[:, begin:]
    return torch.bmm(scores.softmax(-1).to(values.dtype), values).view(heads, rows, -1)
