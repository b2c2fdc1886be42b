"""Staging slots in memory that processes of one host share. Linux only: memfd, /proc and open file description locks.

The memory has no name: others open it through /proc/<pid>/fd/<n> of the process that made it, so the kernel takes it
back when the last of them is gone, however they went. A random token at its beginning shows that it is the one meant.

Whether a life can still write is what a lock says. Each life locks the byte that its incarnation names before it maps
the memory, and the kernel frees the lock with the process. The owner closes a life's session by taking that lock
itself: then the life is gone, or has let go, and never comes back. Time proves nothing: a stopped process goes on.
"""

import errno
import fcntl
import logging
import mmap
import os
import struct
from dataclasses import dataclass

from kvferry.common.base.errors import ConfigError
from kvferry.common.base.ids import Incarnation

_LOG = logging.getLogger("kvferry.kv")
SCHEME = "shm://"
_HEADER_BYTES = mmap.PAGESIZE
_TOKEN_BYTES = 16
_F_OFD_SETLK = 37
"""fcntl(2); Python's fcntl has no name for it."""
_FLOCK = "hhqqi4x"
"""struct flock: type, whence, start, length, pid."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def host_prefix() -> str:
    """What the places of all staging slots begin with that this process can reach: its boot, its process namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{SCHEME}{boot}-{namespace}/"


class ShmSlotMemory:
    """A `SlotMemory` that other processes of this host may map."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._refused: set[Incarnation] = set()

    def open(self) -> str:
        """See SlotMemory. Pages are taken when they are first written."""
        size = _HEADER_BYTES + self.num_slots * self.slot_bytes
        try:
            self._fd = os.memfd_create("kvferry-staging", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        except OSError as error:
            self.close()
            raise ConfigError(
                f'node.kv_transports: no shared memory of {size} bytes for shm: {error}; ["zmq"] needs none'
            ) from error
        token = os.urandom(_TOKEN_BYTES)
        self._map[:_TOKEN_BYTES] = token
        return f"{host_prefix()}{os.getpid()}/{self._fd}/{token.hex()}/{self.num_slots}/{self.slot_bytes}"

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """See SlotMemory. To be dropped before `close`."""
        if self._map is None or not 0 <= slot < self.num_slots or not 0 <= num_bytes <= self.slot_bytes:
            raise ValueError(f"{num_bytes} bytes of staging slot {slot} of {self.num_slots}")
        start = _HEADER_BYTES + slot * self.slot_bytes
        return memoryview(self._map)[start : start + num_bytes]

    def refuse(self, peer: Incarnation) -> bool:
        """See SlotMemory."""
        if peer not in self._refused and _try_lock(self._fd, peer):
            self._refused.add(peer)
        return peer in self._refused

    def close(self) -> None:
        """See SlotMemory."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class _Place:
    pid: int
    fd: int
    token: bytes
    num_slots: int
    slot_bytes: int

    @classmethod
    def parse(cls, text: str) -> "_Place":
        """Raises ValueError."""
        pid, fd, token, num_slots, slot_bytes = text.removeprefix(host_prefix()).split("/")
        return cls(int(pid), int(fd), bytes.fromhex(token), int(num_slots), int(slot_bytes))


@dataclass(slots=True)
class _Mapped:
    fd: int
    memory: mmap.mmap
    num_slots: int
    slot_bytes: int

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)  # and with it the lock


class ShmSlotWriter:
    """A `SlotWriter` for the memory of other processes of this host."""

    def __init__(self, own: Incarnation) -> None:
        self._own = own
        self._peers: dict[Incarnation, _Mapped] = {}

    def open(self, peer: Incarnation, place: str) -> None:
        """See SlotWriter. Not there any more, another's, refused, or no descriptor for it: it stays out of reach."""
        if peer in self._peers:
            return
        try:
            where = _Place.parse(place)
            self._peers[peer] = self._mapped(where)
        except ValueError:
            return
        except OSError as error:
            if error.errno in _NO_ROOM:
                _LOG.warning("staging slots are out of reach, KV goes in messages: %s", error.strerror)

    def fits(self, peer: Incarnation, num_bytes: int) -> bool:
        """See SlotWriter."""
        mapped = self._peers.get(peer)
        return mapped is not None and num_bytes <= mapped.slot_bytes

    def write(self, peer: Incarnation, slot: int, data: bytes | memoryview) -> None:
        """See SlotWriter."""
        mapped, view = self._peers[peer], memoryview(data).cast("B")
        if not 0 <= slot < mapped.num_slots or len(view) > mapped.slot_bytes:
            raise ValueError(f"{len(view)} bytes into staging slot {slot} of {peer}")
        start = _HEADER_BYTES + slot * mapped.slot_bytes
        mapped.memory[start : start + len(view)] = view

    def close(self, peer: Incarnation) -> None:
        """See SlotWriter."""
        mapped = self._peers.pop(peer, None)
        if mapped is not None:
            mapped.close()

    def close_all(self) -> None:
        """See SlotWriter."""
        for peer in list(self._peers):
            self.close(peer)

    def _mapped(self, place: _Place) -> _Mapped:
        size = _HEADER_BYTES + place.num_slots * place.slot_bytes
        fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            # Its length first: /proc may lead to anything by now, and what is not all there must not be mapped.
            if os.fstat(fd).st_size != size or os.pread(fd, _TOKEN_BYTES, 0) != place.token:
                raise ValueError("not the memory that was meant")
            if not _try_lock(fd, self._own):
                raise ValueError("refused")
            return _Mapped(fd, mmap.mmap(fd, size), place.num_slots, place.slot_bytes)
        except BaseException:
            os.close(fd)
            raise


def _try_lock(fd: int, life: Incarnation) -> bool:
    """Take the lock of a life for this open file, or see that another has it or that it cannot be had now."""
    start = int(life[:15], 16)
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES, errno.ENOLCK):  # the last: the kernel has no room for it
            raise
        return False
    return True
