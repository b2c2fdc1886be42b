"""A model's paged KV cache on one device, and its conversion to and from wire order. Knows no transport.

Wire order is [layer, cache tensor, token, *shape_per_token], each value in the cache's dtype, whatever the device's
physical layout. Block ownership is decided by the scheduler; nothing here checks it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.common.base.errors import InvariantError
from kvferry.common.device.base import Device, KvTensorSpec


def bytes_per_token(specs: Sequence[KvTensorSpec], num_layers: int) -> int:
    """Bytes of one token over `num_layers` layers."""
    return num_layers * sum(math.prod(spec.shape_per_token) * spec.dtype.itemsize for spec in specs)


def num_blocks_for(kv_cache_bytes: int, specs: Sequence[KvTensorSpec], num_layers: int, block_size: int) -> int:
    return kv_cache_bytes // (bytes_per_token(specs, num_layers) * block_size)


class KvCache:
    """The cache tensors of all layers, allocated by the constructor."""

    def __init__(
        self,
        device: Device,
        specs: tuple[KvTensorSpec, ...],
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_scratch_blocks: int = 0,
    ) -> None:
        """Scratch blocks follow the `num_blocks` normal ones. No sequence owns them: they take the KV of the padding
        rows of recorded steps."""
        if min(num_layers, num_blocks, block_size) < 1:
            raise ValueError(
                f"a cache of {num_layers} layers, {num_blocks} blocks of {block_size} tokens holds nothing"
            )
        self.specs = specs
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scratch_blocks = range(num_blocks, num_blocks + num_scratch_blocks)
        self._device = device
        self.layers = tuple(
            device.allocate_layer_cache(specs, num_blocks + num_scratch_blocks, block_size) for _ in range(num_layers)
        )
        """One tuple of cache tensors per layer, in the device's layout."""

    @property
    def bytes_per_token(self) -> int:
        """Over all layers."""
        return bytes_per_token(self.specs, self.num_layers)

    @property
    def num_bytes(self) -> int:
        """Size of all blocks but the scratch blocks."""
        return self.bytes_per_token * self.block_size * self.num_blocks

    def range_bytes(self, layer_start: int, layer_end: int, token_start: int, token_end: int) -> int:
        """Number of bytes that `read` returns and `write` expects for these layers and tokens."""
        return bytes_per_token(self.specs, layer_end - layer_start) * (token_end - token_start)

    def read(
        self, layer_start: int, layer_end: int, block_table: Sequence[int], token_start: int, token_end: int
    ) -> memoryview:
        """Copy layers and tokens [start, end) of one sequence, in wire order.

        Token positions index the sequence whose blocks, from position 0 on, are `block_table`. Runs on a side stream,
        concurrently with compute: the KV that is read must be complete.
        """
        self._check_range(layer_start, layer_end, block_table, token_start, token_end)
        out = self._device.pinned_empty(self.range_bytes(layer_start, layer_end, token_start, token_end))
        first, last = token_start // self.block_size, -(-token_end // self.block_size)
        skip = token_start - first * self.block_size
        tokens = slice(skip, skip + token_end - token_start)
        at = 0
        with self._device.side_stream():
            block_ids = self._on_device(block_table[first:last])
            for layer in self.layers[layer_start:layer_end]:
                for cache, spec in zip(layer, self.specs, strict=True):
                    part = self._device.read_blocks(cache, block_ids).flatten(0, 1)[tokens]
                    at = _put(out, at, part, spec)
        return _bytes_of(out).toreadonly()

    def write(
        self,
        layer_start: int,
        layer_end: int,
        block_table: Sequence[int],
        token_start: int,
        token_end: int,
        data: bytes | bytearray | memoryview,
    ) -> None:
        """Write the bytes that `read` returned, here or on another node, to the same tokens of `block_table`.

        Raises ValueError when the number of bytes does not match the range. Runs on a side stream, concurrently with
        compute: no running step may use these tokens' slots.
        """
        self._check_range(layer_start, layer_end, block_table, token_start, token_end)
        expected = self.range_bytes(layer_start, layer_end, token_start, token_end)
        view = memoryview(data).cast("B")
        if len(view) != expected:
            raise ValueError(f"{len(view)} bytes for a range of {expected}")
        staging = self._device.pinned_empty(expected)
        _bytes_of(staging)[:] = view
        at, count = 0, token_end - token_start
        with self._device.side_stream():
            slots = self._slots(block_table, token_start, token_end)
            for layer in self.layers[layer_start:layer_end]:
                for cache, spec in zip(layer, self.specs, strict=True):
                    size = count * math.prod(spec.shape_per_token) * spec.dtype.itemsize
                    tokens = _typed(staging[at : at + size], spec.dtype).view(count, *spec.shape_per_token)
                    on_device = tokens.to(self._device.torch_device, non_blocking=True)
                    self._device.write_tokens(cache, slots, on_device)
                    at += size

    def check_invariants(self) -> None:
        """Every layer has tensors of the expected size and dtype. Raises InvariantError."""
        for index, layer in enumerate(self.layers):
            for cache, spec in zip(layer, self.specs, strict=True):
                wanted = self.scratch_blocks.stop * self.block_size * math.prod(spec.shape_per_token)
                if cache.numel() != wanted or cache.dtype != spec.dtype:
                    raise InvariantError(f"layer {index}: {spec.name} has {cache.numel()} values, wanted {wanted}")

    def _slots(self, block_table: Sequence[int], token_start: int, token_end: int) -> Tensor:
        positions = torch.arange(token_start, token_end)
        blocks = torch.tensor(block_table, dtype=torch.int64)[positions // self.block_size]
        return (blocks * self.block_size + positions % self.block_size).to(self._device.torch_device)

    def _on_device(self, block_ids: Sequence[int]) -> Tensor:
        # 32 bits, as devices gather by (`paged.py`): no conversion on the device.
        return torch.tensor(block_ids, dtype=torch.int32).to(self._device.torch_device)

    def _check_range(
        self, layer_start: int, layer_end: int, block_table: Sequence[int], token_start: int, token_end: int
    ) -> None:
        if not 0 <= layer_start < layer_end <= self.num_layers:
            raise ValueError(f"layers {layer_start} to {layer_end} of {self.num_layers}")
        if not 0 <= token_start < token_end <= len(block_table) * self.block_size:
            raise ValueError(f"tokens {token_start} to {token_end} of {len(block_table)} blocks")
        if any(not 0 <= block < self.num_blocks for block in block_table):
            raise ValueError(f"a block of {list(block_table)} is not in 0 to {self.num_blocks - 1}")


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a uint8 host tensor."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # numpy's stubs do not declare the buffer protocol


def _typed(part: Tensor, dtype: torch.dtype) -> Tensor:
    """View uint8 as another dtype; copied first if tensors of several dtypes left it at an unaligned offset."""
    return (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype)


def _put(out: Tensor, at: int, part: Tensor, spec: KvTensorSpec) -> int:
    """Copy `part` [tokens, *shape] into the bytes `out` from `at` on; returns the end offset."""
    end = at + part.numel() * spec.dtype.itemsize
    if at % spec.dtype.itemsize == 0:
        out[at:end].view(spec.dtype).view(part.shape).copy_(part, non_blocking=True)
    else:
        out[at:end].copy_(part.contiguous().view(-1).view(torch.uint8), non_blocking=True)
    return end
