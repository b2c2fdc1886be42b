"""A ragged batch over a cache in the accelerators' paged layout, with the keys and values that attention must read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.common.device.ops import AttentionMetadata


@dataclass(frozen=True)
class RaggedBatch:
    """`keys` and `values`: [length, K, D] per sequence, all positions; not yet written to `cache`."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    cache: tuple[Tensor, Tensor]
    write_meta: AttentionMetadata
    """The slots of all positions, as a first step would have written them."""
    meta: AttentionMetadata
    """The step to check: the last `new` positions of each sequence."""

    def all_keys(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self.keys), torch.cat(self.values)


def make_ragged_batch(
    lengths, new, *, heads=8, kv_heads=2, size=128, block_size=128, dtype=torch.float32, seed=0, fill=0.0
) -> RaggedBatch:
    """Sequences of `lengths` positions in blocks scattered over the cache; the step computes the last `new` of each."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    order = iter((torch.randperm(num_blocks - 1, generator=generator) + 1).tolist())
    tables = [[next(order) for _ in range(count)] for count in counts]
    padded = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    slots = [
        [table[position // block_size] * block_size + position % block_size for position in range(length)]
        for table, length in zip(tables, lengths, strict=True)
    ]

    def meta(counted):
        starts = [0]
        for count in counted:
            starts.append(starts[-1] + count)
        chosen = [slot for own, count in zip(slots, counted, strict=True) for slot in own[len(own) - count :]]
        return AttentionMetadata(
            tuple(starts),
            tuple(lengths),
            padded,
            torch.tensor(chosen, dtype=torch.int64),
            block_size,
            torch.tensor(lengths),
        )

    shape = (num_blocks, block_size, kv_heads, size)
    return RaggedBatch(
        query=noise(sum(new), heads, size),
        keys=[noise(length, kv_heads, size) for length in lengths],
        values=[noise(length, kv_heads, size) for length in lengths],
        cache=(torch.full(shape, fill, dtype=dtype), torch.full(shape, fill, dtype=dtype)),
        write_meta=meta(lengths),
        meta=meta(new),
    )
