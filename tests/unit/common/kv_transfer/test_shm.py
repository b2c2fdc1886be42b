"""Staging slots in shared memory: mapping, writing, fencing off an incarnation, and cleanup."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.common.base.clock import Clock, ManualClock
from kvferry.common.base.errors import ConfigError
from kvferry.common.base.ids import Incarnation, new_incarnation
from kvferry.common.cluster.events import KvSendFailed, PieceArrived, PieceBad, PieceSent, SessionClosed
from kvferry.common.config.protocol import Limits
from kvferry.common.kv_transfer.send_queue import Window
from kvferry.common.kv_transfer.shm import ShmSlotMemory, ShmSlotWriter, host_prefix
from kvferry.common.kv_transfer.zmq_backend import ZmqKvMover
from kvferry.common.transport.context import TransportContext
from tests.support.kv_memory import MemoryCache, Posted, key_between, piece_of
from tests.support.transport import DEADLINE_S, nothing_left, transport_context, wait_until

OWNER, WRITER, OTHER = (Incarnation(digit * 32) for digit in "123")
SLOT_BYTES = 4096
WINDOW = Window(num_bytes=1_000_000, num_pieces=8, stall_s=DEADLINE_S)
TABLE = (3, 1, 6)


@pytest.fixture(autouse=True)
def _no_descriptor_stays() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture
def slots() -> Iterator[ShmSlotMemory]:
    slots = ShmSlotMemory(4, SLOT_BYTES)
    yield slots
    slots.close()
    slots.close()


@pytest.fixture
def writer() -> Iterator[ShmSlotWriter]:
    writer = ShmSlotWriter(WRITER)
    yield writer
    writer.close_all()


def test_a_write_changes_its_slot_only(slots: ShmSlotMemory, writer: ShmSlotWriter):
    writer.open(OWNER, slots.open())
    writer.open(OWNER, "twice")
    assert writer.fits(OWNER, SLOT_BYTES)
    writer.write(OWNER, 2, b"kv" * 100)
    assert slots.view(2, 200) == b"kv" * 100
    assert not any(bytes(slots.view(slot, SLOT_BYTES)).strip(b"\0") for slot in (0, 1, 3))


def test_a_write_that_does_not_fit_is_refused(slots: ShmSlotMemory, writer: ShmSlotWriter):
    writer.open(OWNER, slots.open())
    assert not writer.fits(OWNER, SLOT_BYTES + 1)
    assert not writer.fits(OTHER, 1)
    for slot, data in ((4, b"x"), (-1, b"x"), (0, bytes(SLOT_BYTES + 1))):
        with pytest.raises(ValueError, match="slot"):
            writer.write(OWNER, slot, data)
    for slot, num_bytes in ((4, 1), (-1, 1), (0, SLOT_BYTES + 1)):
        with pytest.raises(ValueError, match="slot"):
            slots.view(slot, num_bytes)


def other_token(address: str) -> str:
    parts = address.split("/")
    parts[-3] = "ab" * 16
    return "/".join(parts)


@pytest.mark.parametrize(
    "broken",
    [
        other_token,
        lambda address: address.rsplit("/", 1)[0] + f"/{SLOT_BYTES * 2}",
        lambda address: address.rsplit("/", 1)[0],
        lambda address: host_prefix() + "999999999/3/00/1/1",
        lambda address: "shm://elsewhere/1/2/3/4/5",
        lambda address: "",
    ],
)
def test_an_address_of_other_memory_is_not_mapped(slots: ShmSlotMemory, writer: ShmSlotWriter, broken):
    writer.open(OWNER, broken(slots.open()))
    assert not writer.fits(OWNER, 1)


def test_an_incarnation_is_fenced_off_only_after_it_unmapped_the_memory_and_then_for_ever(
    slots: ShmSlotMemory, writer: ShmSlotWriter
):
    address = slots.open()
    writer.open(OWNER, address)
    assert slots.refuse(OTHER)
    assert not slots.refuse(WRITER)
    writer.close(OWNER)
    assert slots.refuse(WRITER)
    writer.open(OWNER, address)
    assert not writer.fits(OWNER, 1)
    assert slots.refuse(WRITER)


def test_mapping_without_a_free_descriptor_fails_with_a_log_line(
    slots: ShmSlotMemory, writer: ShmSlotWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    address = slots.open()
    with monkeypatch.context() as lacking:
        lacking.setattr(os, "open", refuse)
        writer.open(OWNER, address)
    assert not writer.fits(OWNER, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot map the staging slots of {OWNER}, KV goes over zmq: Too many open files"
    ]
    writer.open(OWNER, address)  # with the next Welcome
    assert writer.fits(OWNER, SLOT_BYTES)


def test_fencing_is_retried_when_the_kernel_is_out_of_locks(
    slots: ShmSlotMemory, writer: ShmSlotWriter, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOLCK, "No locks available")

    address = slots.open()
    with monkeypatch.context() as lacking:
        lacking.setattr(fcntl, "fcntl", refuse)
        assert not slots.refuse(WRITER)
        writer.open(OWNER, address)
        assert not writer.fits(OWNER, 1)
    assert slots.refuse(WRITER)


def test_failed_allocation_names_the_configuration_key(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match=r"node\.kv_transports"):
        ShmSlotMemory(1, 4096).open()


# -- across killed processes


WRITES = """
import sys
from kvferry.common.base.ids import Incarnation
from kvferry.common.kv_transfer.shm import ShmSlotWriter
writer = ShmSlotWriter(Incarnation(sys.argv[1]))
writer.open(Incarnation(sys.argv[2]), sys.argv[3])
writer.write(Incarnation(sys.argv[2]), 1, b"from a process that is killed")
print("written", flush=True)
sys.stdin.read()
"""
PROVIDES = """
import sys
from kvferry.common.kv_transfer.shm import ShmSlotMemory
slots = ShmSlotMemory(4, 4096)
print(slots.open(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def child(code: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and its first line of output; killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def staging_maps(pid: int) -> int:
    return sum("kvferry-staging" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


@pytest.mark.rule(26)
def test_a_stopped_writer_is_not_fenced_off_and_a_killed_one_is(slots: ShmSlotMemory):
    with child(WRITES, WRITER, OWNER, slots.open()) as (process, line):
        assert line == "written"
        assert bytes(slots.view(1, 29)) == b"from a process that is killed"
        process.send_signal(signal.SIGSTOP)
        assert not slots.refuse(WRITER)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert slots.refuse(WRITER)


def test_memory_of_a_killed_process_has_no_name_and_is_freed_with_its_last_mapping(writer: ShmSlotWriter):
    with child(PROVIDES) as (process, address):
        writer.open(OWNER, address)
        pid, fd = address.removeprefix(host_prefix()).split("/")[:2]
        assert os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:")  # in no file system
        process.send_signal(signal.SIGKILL)
        process.wait()
    writer.write(OWNER, 0, b"late")  # has no effect on any process
    assert staging_maps(os.getpid()) == 1
    writer.close(OWNER)
    assert staging_maps(os.getpid()) == 0
    late = ShmSlotWriter(OTHER)
    late.open(OWNER, address)
    assert not late.fits(OWNER, 1)


# -- in the mover


class Node:
    """An incarnation with a cache and a mover that uses shared memory."""

    def __init__(
        self,
        context: TransportContext,
        name: str,
        *,
        num_slots: int = 4,
        checksum: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.self_id = new_incarnation()
        self.cache = MemoryCache()
        self.posted = Posted()
        self.mover = ZmqKvMover(
            context,
            self.self_id,
            f"inproc://{name}",
            self.cache,
            Limits(),
            self.posted,
            checksum=checksum,
            window=WINDOW,
            memory=ShmSlotMemory(num_slots, SLOT_BYTES),
            writer=ShmSlotWriter(self.self_id),
            clock=clock,
        )
        self.endpoint = self.mover.start()

    def close(self) -> None:
        self.mover.close()
        self.mover.check_invariants()


@pytest.fixture
def context() -> Iterator[TransportContext]:
    with transport_context() as made:
        yield made


@pytest.fixture
def prefill(context: TransportContext) -> Iterator[Node]:
    node = Node(context, "p")
    node.cache.fill(1)
    yield node
    node.close()


@pytest.fixture
def decode(context: TransportContext) -> Iterator[Node]:
    node = Node(context, "d")
    yield node
    node.close()


def connect(prefill: Node, decode: Node) -> None:
    prefill.mover.open(decode.self_id, decode.endpoint, staging=decode.mover.staging_address)


def pieces_of(prefill: Node, decode: Node, count: int, number: int = 1):
    key = key_between(prefill.self_id, decode.self_id, number)
    return key, [piece_of(prefill.cache, key, i, layers=(i % 4, i % 4 + 1), tokens=(2, 11)) for i in range(count)]


@pytest.mark.parametrize("slots", [(2,), (0, 1, 2, 3)])
def test_more_pieces_than_slots_go_through_the_slots(prefill: Node, decode: Node, slots):
    connect(prefill, decode)
    key, pieces = pieces_of(prefill, decode, 12)
    decode.mover.expect(key, TABLE, 2, slots)
    for piece in pieces:
        prefill.mover.send(piece, TABLE, slots)
    wait_until(lambda: len(decode.posted.of(PieceArrived)) == 12)
    wait_until(lambda: len(prefill.posted.of(PieceSent)) == 12)
    assert decode.mover.counts()[1]["staged"] == prefill.mover.counts()[0]["staged"] == 12
    assert decode.cache.read(0, 4, TABLE, 2, 11) == prefill.cache.read(0, 4, TABLE, 2, 11)


def test_without_a_mapping_or_slots_pieces_go_in_messages(prefill: Node, decode: Node):
    prefill.mover.open(decode.self_id, decode.endpoint, staging="shm://elsewhere/1/2/3/4/5")
    key, pieces = pieces_of(prefill, decode, 2)
    decode.mover.expect(key, TABLE, 2, (0,))
    prefill.mover.send(pieces[0], TABLE, (0,))
    prefill.mover.send(pieces[1], TABLE)
    wait_until(lambda: len(decode.posted.of(PieceArrived)) == 2)
    assert decode.mover.counts()[1]["staged"] == 0


@pytest.mark.rule(26)
def test_a_piece_in_a_slot_not_granted_to_it_writes_no_block(prefill: Node, decode: Node):
    connect(prefill, decode)
    key, pieces = pieces_of(prefill, decode, 1)
    decode.mover.expect(key, TABLE, 2, (1,))
    prefill.mover.send(pieces[0], TABLE, (0,))
    wait_until(lambda: decode.posted.of(PieceBad))
    assert decode.cache.writes == 0


def test_the_checksum_detects_damage_in_a_slot(prefill: Node, decode: Node, monkeypatch: pytest.MonkeyPatch):
    connect(prefill, decode)
    right = ShmSlotWriter.write
    monkeypatch.setattr(
        ShmSlotWriter, "write", lambda self, peer, slot, data: right(self, peer, slot, bytes(len(data)))
    )
    key, pieces = pieces_of(prefill, decode, 1)
    decode.mover.expect(key, TABLE, 2, (1,))
    prefill.mover.send(pieces[0], TABLE, (1,))
    wait_until(lambda: decode.posted.of(PieceBad))
    assert decode.cache.writes == 0


def test_pieces_of_a_forgotten_key_are_credited_and_dropped(prefill: Node, decode: Node):
    connect(prefill, decode)
    _, pieces = pieces_of(prefill, decode, 9)
    for piece in pieces:
        prefill.mover.send(piece, TABLE, (0, 1))
    key, last = pieces_of(prefill, decode, 1, number=2)
    decode.mover.expect(key, TABLE, 2, (2,))
    prefill.mover.send(last[0], TABLE, (2,))
    wait_until(lambda: decode.posted.of(PieceArrived))
    assert decode.mover.counts()[1]["unknown"] == 9
    assert decode.cache.writes == 1
    assert not prefill.posted.of(KvSendFailed)


def test_a_session_closes_when_the_writer_has_unmapped_the_slots(prefill: Node, decode: Node):
    connect(prefill, decode)
    key, pieces = pieces_of(prefill, decode, 1)
    decode.mover.expect(key, TABLE, 2, (1,))
    prefill.mover.send(pieces[0], TABLE, (1,))
    wait_until(lambda: decode.posted.of(PieceArrived))
    decode.mover.close_session(prefill.self_id)
    decode.mover.close_session(OTHER)
    wait_until(lambda: decode.posted.of(SessionClosed))
    assert decode.posted.of(SessionClosed) == [SessionClosed(OTHER)]
    prefill.mover.close_peer(decode.self_id)

    def closed() -> bool:
        decode.mover.close_session(prefill.self_id)
        return SessionClosed(prefill.self_id) in decode.posted.all()

    wait_until(closed)


@pytest.mark.rule(26)
def test_slots_of_a_stalled_node_are_used_again(context: TransportContext, decode: Node):
    clock, resume = ManualClock(), threading.Event()
    prefill = Node(context, "impatient", clock=clock)
    connect(prefill, decode)
    decode.cache.before_write = lambda: resume.wait(DEADLINE_S)
    stalled, pieces = pieces_of(prefill, decode, 1)
    decode.mover.expect(stalled, TABLE, 2, (1,))
    prefill.mover.send(pieces[0], TABLE, (1,))
    wait_until(lambda: prefill.posted.of(PieceSent))
    clock.advance(WINDOW.stall_s)
    prefill.mover.stop(key_between(prefill.self_id, OTHER))  # wakes the thread, which reads the clock
    wait_until(lambda: prefill.posted.of(KvSendFailed))
    assert prefill.posted.of(KvSendFailed) == [KvSendFailed(stalled, "the node accepts no KV")]
    resume.set()
    key, pieces = pieces_of(prefill, decode, 3, number=2)
    decode.mover.expect(key, TABLE, 2, (2,))
    for piece in pieces:
        prefill.mover.send(piece, TABLE, (2,))
    wait_until(lambda: len(decode.posted.of(PieceArrived)) == 4)
    assert decode.mover.counts()[1]["staged"] == 4
    prefill.close()
