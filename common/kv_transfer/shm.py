"""The `shm` transport: staging slots in shared memory of one host. Linux only (memfd, /proc, OFD locks).

The memory has no name. Peers open it through /proc/<pid>/fd/<n> of its owner, so the kernel frees it with the last
process that maps it, however that process ends. A random token at the start identifies it.

A lock shows whether an incarnation can still write. Each writer locks the byte that its incarnation selects before it
maps the memory, and the kernel releases the lock with the process. The owner fences a writer off by taking that lock
itself: the writer is then dead or has closed the memory, and can never map it again. A timeout would prove nothing,
because a stopped process can resume.
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
from kvferry.common.kv_transfer.interface import KvTransport

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
    """Prefix of the addresses of all staging slots that this process can map: boot id and pid namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{SCHEME}{boot}-{namespace}/"


class ShmSlotMemory:
    """A `SlotMemory` that other processes of this host can map."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._refused: set[Incarnation] = set()

    def open(self) -> str:
        """See SlotMemory. The kernel allocates pages on first write."""
        size = _HEADER_BYTES + self.num_slots * self.slot_bytes
        try:
            self._fd = os.memfd_create("kvferry-staging", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        except OSError as error:
            self.close()
            raise ConfigError(
                f'node.kv_transports: cannot allocate {size} bytes of shared memory for shm: {error}; use ["zmq"]'
            ) from error
        token = os.urandom(_TOKEN_BYTES)
        self._map[:_TOKEN_BYTES] = token
        return f"{host_prefix()}{os.getpid()}/{self._fd}/{token.hex()}/{self.num_slots}/{self.slot_bytes}"

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """See SlotMemory. The caller must release the view before `close`."""
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
class _Address:
    pid: int
    fd: int
    token: bytes
    num_slots: int
    slot_bytes: int

    @classmethod
    def parse(cls, text: str) -> "_Address":
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
        os.close(self.fd)  # releases the lock


class ShmSlotWriter:
    """A `SlotWriter` for the memory of other processes of this host."""

    def __init__(self, self_id: Incarnation) -> None:
        self._self_id = self_id
        self._peers: dict[Incarnation, _Mapped] = {}

    def open(self, peer: Incarnation, address: str) -> None:
        """See SlotWriter. Fails if the memory is gone or not the one meant, on a fence, or without descriptors."""
        if peer in self._peers:
            return
        try:
            self._peers[peer] = self._map(_Address.parse(address))
        except ValueError:
            return
        except OSError as error:
            if error.errno in _NO_ROOM:
                _LOG.warning("cannot map the staging slots of %s, KV goes over zmq: %s", peer, error.strerror)

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

    def _map(self, address: _Address) -> _Mapped:
        size = _HEADER_BYTES + address.num_slots * address.slot_bytes
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            # Check the size first: the pid may be reused, and mapping a shorter file would fault on access.
            if os.fstat(fd).st_size != size or os.pread(fd, _TOKEN_BYTES, 0) != address.token:
                raise ValueError("the address leads to other memory")
            if not _try_lock(fd, self._self_id):
                raise ValueError("this incarnation is fenced off")
            return _Mapped(fd, mmap.mmap(fd, size), address.num_slots, address.slot_bytes)
        except BaseException:
            os.close(fd)
            raise


TRANSPORT = KvTransport(
    name="shm",
    is_one_sided=True,
    is_usable=lambda settings: hasattr(os, "memfd_create"),
    staging_host=host_prefix,
    make_memory=ShmSlotMemory,
    make_writer=ShmSlotWriter,
)


def _try_lock(fd: int, incarnation: Incarnation) -> bool:
    """Lock the incarnation's byte for this open file. False: another open file has it, or the kernel refuses now."""
    start = int(incarnation[:15], 16)
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES, errno.ENOLCK):  # ENOLCK: the kernel is out of locks
            raise
        return False
    return True
