"""Packed weights in a file that all nodes of a host map: packed once, in memory once, reused at the next start.

One file per model, dtype, rank part and packed layout. The first node that needs it writes it, mapping each region as
it fills it; other nodes wait and then map the finished file. On any failure of the file a node packs into its own
memory: a problem here delays a start by at most `WAIT_S` and never prevents it.
"""

import contextlib
import fcntl
import json
import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

WAIT_S = 120.0
"""Longest wait for another node that writes the same file; afterwards a node packs into its own memory."""
KEPT_FILES = 4
"""The most recently used files; older ones are removed when a new file is finished."""
SUFFIX = ".kvpacked"

_POLL_S = 0.05
_MAGIC = b"kvferry-packed-1"
_FOOTER_BYTES = len(_MAGIC) + 8
_CHUNK_BYTES = 1 << 24
MAP_BYTES = 1 << 26
"""A new file grows in steps of at least this size."""


class PackedStore:
    """Hands out memory by name. Not thread-safe."""

    def __init__(self, *, finished: "_FinishedFile | None" = None, new: "_NewFile | None" = None) -> None:
        """Serves memory from a finished file, or from a new file that is being written, else plain memory."""
        self._finished = finished
        self._new = new

    def take(self, name: str, num_bytes: int) -> tuple[Tensor, bool]:
        """Return [num_bytes] uint8, page-aligned if mapped, and whether it is already filled.

        The caller must fill memory that is not, before the store is closed, and must not write to it afterwards.
        """
        if self._finished is not None:
            found = self._finished.find(name, num_bytes)
            if found is not None:
                return found, True
        if self._new is not None:
            try:
                return self._new.add(name, num_bytes), False
            except OSError:
                # For example, the disk is full. Memory mapped so far stays valid; the file is never finished.
                self._new.discard()
                self._new = None
        return torch.empty(num_bytes, dtype=torch.uint8), False


@contextlib.contextmanager
def open_store(path: Path) -> Iterator[PackedStore]:
    """The store at `path`. A new file is renamed to `path` atomically on exit without an error."""
    finished = _FinishedFile.open(path)
    if finished is not None:
        yield PackedStore(finished=finished)
        return
    with _locked(path) as is_ours:
        # Another node may have finished the file while this one waited for the lock.
        finished = _FinishedFile.open(path) if is_ours else None
        new = _NewFile.create(path) if is_ours and finished is None else None
        store = PackedStore(finished=finished, new=new)
        try:
            yield store
        except BaseException:
            if new is not None:
                new.discard()
            raise
        if new is not None:
            with contextlib.suppress(OSError):
                new.finish()
                _remove_oldest(path.parent)
            new.discard()


class _FinishedFile:
    """A complete file, mapped."""

    def __init__(self, memory: Tensor, index: dict[str, tuple[int, int]]) -> None:
        self._memory = memory
        self._index = index

    @classmethod
    def open(cls, path: Path) -> "_FinishedFile | None":
        """None if the file is missing, incomplete or damaged."""
        try:
            with path.open("rb") as file:
                os.utime(file.fileno())
                return cls._map(file)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @classmethod
    def _map(cls, file: IO[bytes]) -> "_FinishedFile":
        size = os.fstat(file.fileno()).st_size
        # Copy on write because torch requires writable memory; in fact nothing writes to it.
        pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        length = int.from_bytes(pages[size - _FOOTER_BYTES : size - len(_MAGIC)], "little")
        end = size - _FOOTER_BYTES - length
        if pages[size - len(_MAGIC) :] != _MAGIC or end < 0:
            raise ValueError("not a finished file")
        head = json.loads(pages[end : end + length])
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if _checksum(memory, end) != head["crc32"]:
            raise ValueError("damaged")
        return cls(memory, {name: (start, count) for name, (start, count) in head["index"].items()})

    def find(self, name: str, num_bytes: int) -> Tensor | None:
        """None if there is no entry of this name and size."""
        start, count = self._index.get(name, (0, -1))
        return self._memory[start : start + count] if count == num_bytes else None


class _NewFile:
    """A file that is being written through mappings of its regions. Not visible to other processes before `finish`."""

    def __init__(self, file: IO[bytes], target: Path) -> None:
        self._file: IO[bytes] | None = file
        self._temporary = Path(file.name)
        self._target = target
        self._end = 0
        self._index: dict[str, tuple[int, int]] = {}
        self._maps: list[mmap.mmap] = []
        self._rest = torch.empty(0, dtype=torch.uint8)
        """The unused part of the last mapping."""

    @classmethod
    def create(cls, target: Path) -> "_NewFile | None":
        """None if no file can be created."""
        try:
            return cls(tempfile.NamedTemporaryFile(dir=target.parent, prefix=".new-", delete=False), target)
        except OSError:
            return None

    def add(self, name: str, num_bytes: int) -> Tensor:
        """Memory for a new entry. Raises OSError if the disk is full: here, not as a signal when it is written."""
        start = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        free = self._rest[start - self._end :]
        if len(free) < num_bytes:
            free = self._map(start, max(num_bytes, MAP_BYTES))
        self._index[name] = start, num_bytes
        self._end, self._rest = start + num_bytes, free[num_bytes:]
        return free[:num_bytes]

    def _map(self, start: int, num_bytes: int) -> Tensor:
        # Python keeps a file descriptor per mapping, so each mapping holds many entries.
        assert self._file is not None
        os.posix_fallocate(self._file.fileno(), start, num_bytes)
        self._maps.append(mmap.mmap(self._file.fileno(), num_bytes, access=mmap.ACCESS_WRITE, offset=start))
        return torch.frombuffer(self._maps[-1], dtype=torch.uint8)

    def finish(self) -> None:
        """Write the index, sync the file to disk and rename it to its target. All entries must be filled.

        Does nothing if the file was discarded or is empty.
        """
        if self._file is None or not self._index:
            return
        for part in self._maps:
            part.flush()
        os.ftruncate(self._file.fileno(), self._end)
        with mmap.mmap(self._file.fileno(), self._end, access=mmap.ACCESS_COPY) as pages:
            memory = torch.frombuffer(pages, dtype=torch.uint8)
            head = json.dumps({"crc32": _checksum(memory, self._end), "index": self._index}).encode()
            del memory
        self._file.seek(self._end)
        self._file.write(head + len(head).to_bytes(8, "little") + _MAGIC)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.rename(self._target)

    def discard(self) -> None:
        """Close the file and remove it unless it was finished. Memory that was handed out stays valid."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yield whether this process holds the lock for writing `path`. The kernel releases a dead process's lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("wb")
    except OSError:
        yield False
        return
    with file:
        yield _acquired(file, path)


def _acquired(file: IO[bytes], path: Path) -> bool:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_POLL_S)
    return False


def _remove_oldest(directory: Path) -> None:
    # A node that has mapped a removed file keeps the mapping until it ends.
    files = sorted(directory.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[KEPT_FILES:]:
        file.unlink(missing_ok=True)
        file.with_suffix(".lock").unlink(missing_ok=True)


def _checksum(memory: Tensor, end: int) -> int:
    """crc32 of [0, end), computed in chunks without a copy; as a side effect it loads the pages."""
    crc = 0
    for start in range(0, end, _CHUNK_BYTES):
        crc = zlib.crc32(memoryview(memory[start : min(start + _CHUNK_BYTES, end)].numpy()), crc)  # type: ignore[arg-type]
    return crc
