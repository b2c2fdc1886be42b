"""The paged cache layout [num_blocks, block_size, *shape_per_token] of accelerators. Names no device.

It is Ascend's own layout (keys and values separate, whole blocks contiguous) and, within a block, the canonical order
of the wire, so reading blocks is one gather without a transposition.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.common.device.base import KvTensorSpec


def allocate_paged(
    specs: Sequence[KvTensorSpec], num_blocks: int, block_size: int, device: torch.device, alignment: int = 1
) -> tuple[Tensor, ...]:
    """Zeroed cache tensors of one layer, all from one allocation, each starting at a multiple of `alignment` bytes.

    One allocation per layer keeps the number of regions small that a transport must register.
    """
    sizes = [num_blocks * block_size * math.prod(spec.shape_per_token) * spec.dtype.itemsize for spec in specs]
    strides = [_round_up(size, alignment) for size in sizes]
    arena = torch.zeros(sum(strides) + alignment, dtype=torch.uint8, device=device)
    offset = -arena.data_ptr() % alignment
    tensors = []
    for spec, size, stride in zip(specs, sizes, strides, strict=True):
        region = arena[offset : offset + size].view(spec.dtype)
        tensors.append(region.view(num_blocks, block_size, *spec.shape_per_token))
        offset += stride
    return tuple(tensors)


def read_paged_blocks(cache: Tensor, block_ids: Tensor) -> Tensor:
    """[len(block_ids), block_size, *shape_per_token], contiguous, on the cache's device."""
    # 32-bit indices suffice for block numbers; an NPU gathers with 64-bit indices on a slow path.
    return cache.index_select(0, block_ids.to(cache.device, torch.int32))


def write_paged_tokens(cache: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Write tokens [n, *shape_per_token] at `slots` [n]; both may be host tensors. Slots must not repeat."""
    flat = cache.view(-1, *cache.shape[2:])
    flat[slots.to(cache.device, torch.int64)] = tokens.to(cache.device, cache.dtype)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
