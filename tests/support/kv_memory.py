"""A KV cache in plain memory for tests of movers: bytes are inspectable, and reads and writes can be delayed."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.common.base.ids import Incarnation, RequestId, TransferKey
from kvferry.common.kv_transfer.interface import KvEvent
from kvferry.common.protocol.messages import Piece


class MemoryCache:
    """[layer, block * block_size + offset, bytes of a token]."""

    def __init__(self, *, num_layers: int = 4, num_blocks: int = 8, block_size: int = 4, token_bytes: int = 8) -> None:
        self.block_size = block_size
        self.token_bytes = token_bytes
        self.bytes = np.zeros((num_layers, num_blocks * block_size, token_bytes), np.uint8)
        self.before_write: Callable[[], object] = lambda: None
        self.before_read: Callable[[], object] = lambda: None
        self.writes = 0

    def fill(self, seed: int) -> "MemoryCache":
        """Fill all blocks with random bytes."""
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.shape, np.uint8)
        return self

    def num_bytes(self, layers: int, tokens: int) -> int:
        """Size of a piece."""
        return layers * tokens * self.token_bytes

    def rows(self, block_table: Sequence[int], start: int, end: int) -> list[int]:
        """Row of each position in `bytes`."""
        size = self.block_size
        if not 0 <= start < end <= len(block_table) * size:
            raise ValueError(f"tokens {start} to {end} of {len(block_table)} blocks")
        return [block_table[position // size] * size + position % size for position in range(start, end)]

    def read(
        self, layer_start: int, layer_end: int, block_table: Sequence[int], token_start: int, token_end: int
    ) -> memoryview:
        """See BlockBytes."""
        self.before_read()
        part = self.bytes[layer_start:layer_end, self.rows(block_table, token_start, token_end)]
        return memoryview(np.ascontiguousarray(part).reshape(-1))  # type: ignore[arg-type]

    def write(
        self,
        layer_start: int,
        layer_end: int,
        block_table: Sequence[int],
        token_start: int,
        token_end: int,
        data: bytes | bytearray | memoryview,
    ) -> None:
        """See BlockBytes."""
        rows = self.rows(block_table, token_start, token_end)
        if not 0 <= layer_start < layer_end <= len(self.bytes):
            raise ValueError(f"layers {layer_start} to {layer_end}")
        self.before_write()
        shape = (layer_end - layer_start, len(rows), self.token_bytes)
        self.bytes[layer_start:layer_end, rows] = np.frombuffer(data, np.uint8).reshape(shape)
        self.writes += 1


class Posted:
    """Collects a mover's events. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[KvEvent] = []

    def __call__(self, event: KvEvent) -> None:
        with self._lock:
            self._events.append(event)

    def all(self) -> list[KvEvent]:
        with self._lock:
            return list(self._events)

    def of(self, *kinds: type) -> list[KvEvent]:
        """Events of the given types."""
        return [event for event in self.all() if isinstance(event, kinds)]


def key_between(prefill: Incarnation, decode: Incarnation, number: int = 1) -> TransferKey:
    return TransferKey(RequestId(f"{number:032x}"), 1, 1, prefill, decode)


def piece_of(
    cache: MemoryCache, key: TransferKey, number: int = 0, *, layers: tuple[int, int], tokens: tuple[int, int]
) -> Piece:
    """A piece without data, of the right length."""
    return Piece(
        key=key,
        number=number,
        layer_start=layers[0],
        layer_end=layers[1],
        token_start=tokens[0],
        token_end=tokens[1],
        num_bytes=cache.num_bytes(layers[1] - layers[0], tokens[1] - tokens[0]),
    )
