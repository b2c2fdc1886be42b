"""The transfer keys whose pieces may be written, with their blocks. Thread-safe; does no socket IO.

The only lock shared by the control and the KV thread. `forget` and a write of the same key exclude each other: after
`forget` has returned, no byte is written for that key. It waits for the write of one piece at most.
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
    """The outcome of a piece."""

    WRITTEN = "written"
    UNKNOWN = "unknown"
    """The key is not expected (any more): nothing was written."""
    BAD = "bad"
    """The key is expected, but the piece is invalid: nothing was written."""


@dataclass(slots=True)
class _Expectation:
    block_table: tuple[int, ...]
    first_token: int
    slots: tuple[int, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True


class Expectations:
    """Expected keys, each with its blocks."""

    def __init__(self, cache: BlockBytes) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._by_key: dict[TransferKey, _Expectation] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def expect(
        self, key: TransferKey, block_table: tuple[int, ...], first_token: int, slots: tuple[int, ...] = ()
    ) -> None:
        """Accept pieces of this key. Raises InvariantError when it is expected already."""
        with self._lock:
            if key in self._by_key:
                raise InvariantError(f"{key} is expected already")
            self._by_key[key] = _Expectation(block_table, first_token, slots)

    def forget(self, key: TransferKey) -> None:
        """Accept no more pieces of this key; waits for a write of it in progress. No effect for an unknown key."""
        with self._lock:
            expectation = self._by_key.pop(key, None)
        if expectation is not None:
            with expectation.lock:
                expectation.is_open = False

    def write(self, piece: Piece, data: Frame) -> tuple[Verdict, str]:
        """Validate a piece and write it into its blocks. Returns the verdict, and a reason when it is BAD.

        `data`: the piece's bytes, from the message or from the staging slot that it names.
        """
        with self._lock:
            expectation = self._by_key.get(piece.key)
        if expectation is None:
            return Verdict.UNKNOWN, ""
        if piece.slot is not None and piece.slot not in expectation.slots:
            return Verdict.BAD, f"staging slot {piece.slot} is not granted to it"
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
        return f"{size} bytes arrived, {piece.num_bytes} were announced"
    if piece.token_start < first_token:
        return f"position {piece.token_start} is below {first_token}, the first requested one"
    if piece.number < 0:
        return f"negative number {piece.number}"
    if piece.checksum is not None and zlib.crc32(data) != piece.checksum:
        return "wrong checksum"
    return ""
