"""Packed weights in a file that every node of a host maps: packed once, in memory once, there at the next start.

One file for each model, dtype, part of it, and way of packing. The first node that needs it writes it and maps what it
writes; others wait for that, and map the whole. Whatever goes wrong with the file, a node packs into memory of its own:
nothing here can keep a node from starting but for `WAIT_S`.
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
"""For another node that packs the same; then a node packs for itself."""
KEPT_FILES = 4
"""The files that were used last; others are removed when a new one is written."""
SUFFIX = ".kvpacked"

_POLL_S = 0.05
_MAGIC = b"kvferry-packed-1"
_FOOTER_BYTES = len(_MAGIC) + 8
_CHUNK_BYTES = 1 << 24
MAP_BYTES = 1 << 26
"""A new file grows by this much at least."""


class PackedStore:
    """Memory by name. Not for use by several threads."""

    def __init__(self, *, whole: "_Mapped | None" = None, new: "_NewFile | None" = None) -> None:
        """`whole`: everything is there already. `new`: what is asked for is kept. Neither: plain memory."""
        self._whole = whole
        self._new = new

    def take(self, name: str, num_bytes: int) -> tuple[Tensor, bool]:
        """[num_bytes] uint8, aligned to a page where it is mapped, and whether it is filled already.

        What is not filled must be filled before the store is closed, and never written again.
        """
        if self._whole is not None:
            found = self._whole.find(name, num_bytes)
            if found is not None:
                return found, True
        if self._new is not None:
            try:
                return self._new.add(name, num_bytes), False
            except OSError:
                # The disk is full, say. What was mapped so far stays usable; the file is never finished.
                self._new.give_up()
                self._new = None
        return torch.empty(num_bytes, dtype=torch.uint8), False


@contextlib.contextmanager
def open_store(path: Path) -> Iterator[PackedStore]:
    """The store behind `path`; on leaving without an error what is new gets that name, in one step."""
    whole = _Mapped.open(path)
    if whole is not None:
        yield PackedStore(whole=whole)
        return
    with _locked(path) as is_ours:
        # Another node may have finished it meanwhile.
        whole = _Mapped.open(path) if is_ours else None
        new = _NewFile.create(path) if is_ours and whole is None else None
        store = PackedStore(whole=whole, new=new)
        try:
            yield store
        except BaseException:
            if new is not None:
                new.give_up()
            raise
        if new is not None:
            with contextlib.suppress(OSError):
                new.finish()
                _remove_oldest(path.parent)
            new.give_up()


class _Mapped:
    """A finished file."""

    def __init__(self, memory: Tensor, index: dict[str, tuple[int, int]]) -> None:
        self._memory = memory
        self._index = index

    @classmethod
    def open(cls, path: Path) -> "_Mapped | None":
        """None when it is not there or not whole."""
        try:
            with path.open("rb") as file:
                os.utime(file.fileno())
                return cls._map(file)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @classmethod
    def _map(cls, file: IO[bytes]) -> "_Mapped":
        size = os.fstat(file.fileno()).st_size
        # Writes would be this process's own. Nobody writes; torch wants memory that could be written.
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
        """None when it is not there in this size."""
        start, count = self._index.get(name, (0, -1))
        return self._memory[start : start + count] if count == num_bytes else None


class _NewFile:
    """A file that is being written, by mapping it piece by piece. Nobody sees it before `finish`."""

    def __init__(self, file: IO[bytes], target: Path) -> None:
        self._file: IO[bytes] | None = file
        self._temporary = Path(file.name)
        self._target = target
        self._end = 0
        self._index: dict[str, tuple[int, int]] = {}
        self._maps: list[mmap.mmap] = []
        self._preemption = torch.empty(0, dtype=torch.uint8)
        """What is left of the last mapping."""

    @classmethod
    def create(cls, target: Path) -> "_NewFile | None":
        """None where no file can be written."""
        try:
            return cls(tempfile.NamedTemporaryFile(dir=target.parent, prefix=".new-", delete=False), target)
        except OSError:
            return None

    def add(self, name: str, num_bytes: int) -> Tensor:
        """OSError when there is no room: that is found out now, not by a signal when the memory is written."""
        start = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        room = self._preemption[start - self._end :]
        if len(room) < num_bytes:
            room = self._map(start, max(num_bytes, MAP_BYTES))
        self._index[name] = start, num_bytes
        self._end, self._preemption = start + num_bytes, room[num_bytes:]
        return room[:num_bytes]

    def _map(self, start: int, num_bytes: int) -> Tensor:
        """Python keeps a descriptor for each mapping, so one serves for many parts."""
        assert self._file is not None
        os.posix_fallocate(self._file.fileno(), start, num_bytes)
        self._maps.append(mmap.mmap(self._file.fileno(), num_bytes, access=mmap.ACCESS_WRITE, offset=start))
        return torch.frombuffer(self._maps[-1], dtype=torch.uint8)

    def finish(self) -> None:
        """Everything is filled: write the index, and give the file its name once all of it is on the disk.

        Does nothing where it was given up or holds nothing.
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

    def give_up(self) -> None:
        """Close it; without `finish` nothing is left on the disk. Memory that was handed out stays."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether this process alone may write it. The kernel frees the lock of one that dies."""
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
    """Nodes that have one of these mapped keep it until they end."""
    files = sorted(directory.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[KEPT_FILES:]:
        file.unlink(missing_ok=True)
        file.with_suffix(".lock").unlink(missing_ok=True)


def _checksum(memory: Tensor, end: int) -> int:
    """Of [0, end), in pieces, so that no copy is made; it also brings the pages in."""
    crc = 0
    for start in range(0, end, _CHUNK_BYTES):
        crc = zlib.crc32(memoryview(memory[start : min(start + _CHUNK_BYTES, end)].numpy()), crc)  # type: ignore[arg-type]
    return crc
