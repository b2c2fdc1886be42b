"""Which transfer keys may be written, and where. Used by two threads; the only lock between control and KV.

`forget` and a write exclude each other: once `forget` has returned, no byte is written for that key. It waits for one
piece's write at most. Knows nothing of sockets.
"""

import threading
import zlib
from dataclasses import dataclass, field
from enum import Enum

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import TransferKey
from kvferry.common.kv_transfer.interface import BlockBytes
from kvferry.common.protocol.messages import Piece
from kvferry.common.protocol.wire import Frame


class Verdict(Enum):
    """What became of a piece."""

    WRITTEN = "written"
    UNKNOWN = "unknown"
    """Nobody expects this key (any more): nothing was touched."""
    BAD = "bad"
    """The key is right and the piece is not: nothing was written."""


@dataclass(slots=True)
class _Expectation:
    block_table: tuple[int, ...]
    first_token: int
    slots: tuple[int, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True


class Expectations:
    """Keys that are expected, each with its blocks."""

    def __init__(self, cache: BlockBytes) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._by_key: dict[TransferKey, _Expectation] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def expect(
        self, key: TransferKey, block_table: tuple[int, ...], first_token: int, slots: tuple[int, ...] = ()
    ) -> None:
        """Let pieces be written. InvariantError when the key is expected already."""
        with self._lock:
            if key in self._by_key:
                raise InvariantError(f"{key} is expected already")
            self._by_key[key] = _Expectation(block_table, first_token, slots)

    def forget(self, key: TransferKey) -> None:
        """Let no more be written; waits for a write of this key that is under way. An unknown key changes nothing."""
        with self._lock:
            expectation = self._by_key.pop(key, None)
        if expectation is not None:
            with expectation.lock:
                expectation.is_open = False

    def write(self, piece: Piece, data: Frame) -> tuple[Verdict, str]:
        """Check a piece and put it into its blocks; what came of it, and why when it is bad.

        `data` is what it brought, or what is in the staging slot that it names.
        """
        with self._lock:
            expectation = self._by_key.get(piece.key)
        if expectation is None:
            return Verdict.UNKNOWN, ""
        if piece.slot is not None and piece.slot not in expectation.slots:
            return Verdict.BAD, f"staging slot {piece.slot} is not its own"
        fault = _fault(piece, data, expectation.first_token)
        if fault:
            return Verdict.BAD, fault
        with expectation.lock:
            if not expectation.is_open:
                return Verdict.UNKNOWN, ""
            try:
                self._cache.write(
                    piece.layer_start,
                    piece.layer_end,
                    expectation.block_table,
                    piece.token_start,
                    piece.token_end,
                    data,
                )
            except ValueError as error:
                return Verdict.BAD, str(error)
        return Verdict.WRITTEN, ""


def _fault(piece: Piece, data: Frame, first_token: int) -> str:
    size = memoryview(data).nbytes
    if size != piece.num_bytes:
        return f"{size} bytes came, {piece.num_bytes} were announced"
    if piece.token_start < first_token:
        return f"position {piece.token_start} is below {first_token}, the first one asked for"
    if piece.number < 0:
        return f"number {piece.number}"
    if piece.checksum is not None and zlib.crc32(data) != piece.checksum:
        return "checksum"
    return ""
