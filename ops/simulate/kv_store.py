"""The simulated KV cache: contents by layer, block and position. Detects wrong contents, not wrong owners."""

from collections.abc import Sequence

from kvferry.ops.simulate.model import content


class KvMismatchError(Exception):
    """A position does not hold the KV of its token ids: garbage, KV of another request, or nothing."""


class KvStore:
    """One integer for each (layer, block, slot); 0 is memory never written."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.num_layers = num_layers
        self.block_size = block_size
        self._layers = [[0] * (num_blocks * block_size) for _ in range(num_layers)]
        self._host_layers = [[0] * (num_host_blocks * block_size) for _ in range(num_layers)]

    def write(self, layer: int, table: Sequence[int], start: int, values: Sequence[int]) -> None:
        """Write values to positions start, start + 1, ... of a block table."""
        cells, size = self._layers[layer], self.block_size
        for position, value in enumerate(values, start):
            cells[table[position // size] * size + position % size] = value

    def read(self, layer: int, table: Sequence[int], start: int, end: int) -> list[int]:
        """Return the values at positions start .. end - 1 of a block table."""
        cells, size = self._layers[layer], self.block_size
        return [cells[table[position // size] * size + position % size] for position in range(start, end)]

    def copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy whole blocks to the host, pairwise."""
        for cells, host in zip(self._layers, self._host_layers, strict=True):
            self._copy(cells, device_blocks, host, host_blocks)

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy whole blocks from the host, pairwise."""
        for cells, host in zip(self._layers, self._host_layers, strict=True):
            self._copy(host, host_blocks, cells, device_blocks)

    def _copy(self, source: list[int], blocks: Sequence[int], target: list[int], to: Sequence[int]) -> None:
        size = self.block_size
        for block, other in zip(blocks, to, strict=True):
            target[other * size : (other + 1) * size] = source[block * size : (block + 1) * size]

    def check(self, table: Sequence[int], digests: Sequence[int], num_tokens: int, who: str) -> None:
        """Raise KvMismatchError unless positions 0 .. num_tokens - 1 match the digests in every layer."""
        size = self.block_size
        for layer, cells in enumerate(self._layers):
            for first in range(0, num_tokens, size):
                end = min(first + size, num_tokens)
                at = table[first // size] * size
                found = cells[at : at + end - first]
                if found != [content(digest, layer) for digest in digests[first:end]]:
                    what = "nothing" if 0 in found else "other content"
                    raise KvMismatchError(f"{who}: positions {first} to {end - 1} of layer {layer} hold {what}")
