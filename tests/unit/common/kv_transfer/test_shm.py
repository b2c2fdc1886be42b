"""Staging slots in shared memory: who reaches them, how a life is refused, and that nothing of them is left."""

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

from kvferry.common.base.clock import (
    Clock,
    ManualClock,
)
from kvferry.common.base.errors import ConfigError
from kvferry.common.base.ids import (
    Incarnation,
    new_incarnation,
)
from kvferry.common.cluster.events import (
    KvSendFailed,
    PieceArrived,
    PieceBad,
    PieceSent,
    SessionClosed,
)
from kvferry.common.config.protocol import Limits
from kvferry.common.kv_transfer.send_queue import Window
from kvferry.common.kv_transfer.shm import ShmReach, ShmSlots, host_prefix
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
def slots() -> Iterator[ShmSlots]:
    slots = ShmSlots(4, SLOT_BYTES)
    yield slots
    slots.close()
    slots.close()


@pytest.fixture
def reach() -> Iterator[ShmReach]:
    reach = ShmReach(WRITER)
    yield reach
    reach.close_all()


def test_what_is_written_is_there_and_in_no_other_slot(slots: ShmSlots, reach: ShmReach):
    reach.open(OWNER, slots.open())
    reach.open(OWNER, "twice")
    assert reach.fits(OWNER, SLOT_BYTES)
    reach.write(OWNER, 2, b"kv" * 100)
    assert slots.view(2, 200) == b"kv" * 100
    assert not any(bytes(slots.view(slot, SLOT_BYTES)).strip(b"\0") for slot in (0, 1, 3))


def test_what_does_not_fit_is_not_written(slots: ShmSlots, reach: ShmReach):
    reach.open(OWNER, slots.open())
    assert not reach.fits(OWNER, SLOT_BYTES + 1)
    assert not reach.fits(OTHER, 1)
    for slot, data in ((4, b"x"), (-1, b"x"), (0, bytes(SLOT_BYTES + 1))):
        with pytest.raises(ValueError, match="slot"):
            reach.write(OWNER, slot, data)
    for slot, num_bytes in ((4, 1), (-1, 1), (0, SLOT_BYTES + 1)):
        with pytest.raises(ValueError, match="slot"):
            slots.view(slot, num_bytes)


def other_token(place: str) -> str:
    parts = place.split("/")
    parts[-3] = "ab" * 16
    return "/".join(parts)


@pytest.mark.parametrize(
    "broken",
    [
        other_token,
        lambda place: place.rsplit("/", 1)[0] + f"/{SLOT_BYTES * 2}",
        lambda place: place.rsplit("/", 1)[0],
        lambda place: host_prefix() + "999999999/3/00/1/1",
        lambda place: "shm://elsewhere/1/2/3/4/5",
        lambda place: "",
    ],
)
def test_memory_that_is_not_the_one_meant_stays_out_of_reach(slots: ShmSlots, reach: ShmReach, broken):
    reach.open(OWNER, broken(slots.open()))
    assert not reach.fits(OWNER, 1)


def test_a_life_that_maps_the_memory_is_refused_only_when_it_has_let_go_and_then_for_ever(
    slots: ShmSlots, reach: ShmReach
):
    place = slots.open()
    reach.open(OWNER, place)
    assert slots.refuse(OTHER)
    assert not slots.refuse(WRITER)
    reach.close(OWNER)
    assert slots.refuse(WRITER)
    reach.open(OWNER, place)
    assert not reach.fits(OWNER, 1)
    assert slots.refuse(WRITER)


def test_memory_that_no_descriptor_is_left_for_is_out_of_reach_and_told_of(
    slots: ShmSlots, reach: ShmReach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    place = slots.open()
    with monkeypatch.context() as lacking:
        lacking.setattr(os, "open", refuse)
        reach.open(OWNER, place)
    assert not reach.fits(OWNER, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "staging slots are out of reach, KV goes in messages: Too many open files"
    ]
    reach.open(OWNER, place)  # with the next Welcome
    assert reach.fits(OWNER, SLOT_BYTES)


def test_a_lock_that_the_kernel_has_no_room_for_is_asked_for_again(
    slots: ShmSlots, reach: ShmReach, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOLCK, "No locks available")

    place = slots.open()
    with monkeypatch.context() as lacking:
        lacking.setattr(fcntl, "fcntl", refuse)
        assert not slots.refuse(WRITER)
        reach.open(OWNER, place)
        assert not reach.fits(OWNER, 1)
    assert slots.refuse(WRITER)


def test_without_memory_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match=r"node\.kv_transports"):
        ShmSlots(1, 4096).open()


# -- across processes that are killed


WRITES = """
import sys
from kvferry.common.base.ids import Incarnation
from kvferry.common.kv_transfer.shm import ShmReach
reach = ShmReach(Incarnation(sys.argv[1]))
reach.open(Incarnation(sys.argv[2]), sys.argv[3])
reach.write(Incarnation(sys.argv[2]), 1, b"from a process that is killed")
print("written", flush=True)
sys.stdin.read()
"""
LENDS = """
import sys
from kvferry.common.kv_transfer.shm import ShmSlots
slots = ShmSlots(4, 4096)
print(slots.open(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def child(code: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and the first line that it says; killed at the end."""
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
def test_a_writer_that_was_stopped_is_not_refused_and_one_that_was_killed_is(slots: ShmSlots):
    with child(WRITES, WRITER, OWNER, slots.open()) as (process, said):
        assert said == "written"
        assert bytes(slots.view(1, 29)) == b"from a process that is killed"
        process.send_signal(signal.SIGSTOP)
        assert not slots.refuse(WRITER)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert slots.refuse(WRITER)


def test_memory_of_a_killed_process_has_no_name_and_goes_with_the_last_who_maps_it(reach: ShmReach):
    with child(LENDS) as (process, place):
        reach.open(OWNER, place)
        pid, fd = place.removeprefix(host_prefix()).split("/")[:2]
        assert os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:")  # no file system has it
        process.send_signal(signal.SIGKILL)
        process.wait()
    reach.write(OWNER, 0, b"late")  # harms nobody
    assert staging_maps(os.getpid()) == 1
    reach.close(OWNER)
    assert staging_maps(os.getpid()) == 0
    late = ShmReach(OTHER)
    late.open(OWNER, place)
    assert not late.fits(OWNER, 1)


# -- in the mover


class Node:
    """One process life with a cache and a mover that shares memory."""

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
            memory=ShmSlots(num_slots, SLOT_BYTES),
            reach=ShmReach(self.self_id),
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


def joined(prefill: Node, decode: Node) -> None:
    prefill.mover.open(decode.self_id, decode.endpoint, staging=decode.mover.staging_place)


def pieces_of(prefill: Node, decode: Node, count: int, number: int = 1):
    key = key_between(prefill.self_id, decode.self_id, number)
    return key, [piece_of(prefill.cache, key, i, layers=(i % 4, i % 4 + 1), tokens=(2, 11)) for i in range(count)]


@pytest.mark.parametrize("slots", [(2,), (0, 1, 2, 3)])
def test_pieces_go_through_slots_and_more_of_them_than_there_are_slots(prefill: Node, decode: Node, slots):
    joined(prefill, decode)
    key, pieces = pieces_of(prefill, decode, 12)
    decode.mover.expect(key, TABLE, 2, slots)
    for piece in pieces:
        prefill.mover.send(piece, TABLE, slots)
    wait_until(lambda: len(decode.posted.of(PieceArrived)) == 12)
    wait_until(lambda: len(prefill.posted.of(PieceSent)) == 12)
    assert decode.mover.counts()[1]["staged"] == prefill.mover.counts()[0]["staged"] == 12
    assert decode.cache.read(0, 4, TABLE, 2, 11) == prefill.cache.read(0, 4, TABLE, 2, 11)


def test_without_reach_without_slots_and_too_large_pieces_go_in_messages(prefill: Node, decode: Node):
    prefill.mover.open(decode.self_id, decode.endpoint, staging="shm://elsewhere/1/2/3/4/5")
    key, pieces = pieces_of(prefill, decode, 2)
    decode.mover.expect(key, TABLE, 2, (0,))
    prefill.mover.send(pieces[0], TABLE, (0,))
    prefill.mover.send(pieces[1], TABLE)
    wait_until(lambda: len(decode.posted.of(PieceArrived)) == 2)
    assert decode.mover.counts()[1]["staged"] == 0


@pytest.mark.rule(26)
def test_a_slot_that_is_not_its_own_writes_no_block(prefill: Node, decode: Node):
    joined(prefill, decode)
    key, pieces = pieces_of(prefill, decode, 1)
    decode.mover.expect(key, TABLE, 2, (1,))
    prefill.mover.send(pieces[0], TABLE, (0,))
    wait_until(lambda: decode.posted.of(PieceBad))
    assert decode.cache.writes == 0


def test_bytes_that_were_damaged_in_a_slot_are_found(prefill: Node, decode: Node, monkeypatch: pytest.MonkeyPatch):
    joined(prefill, decode)
    right = ShmReach.write
    monkeypatch.setattr(ShmReach, "write", lambda self, peer, slot, data: right(self, peer, slot, bytes(len(data))))
    key, pieces = pieces_of(prefill, decode, 1)
    decode.mover.expect(key, TABLE, 2, (1,))
    prefill.mover.send(pieces[0], TABLE, (1,))
    wait_until(lambda: decode.posted.of(PieceBad))
    assert decode.cache.writes == 0


def test_what_is_forgotten_is_credited_and_copied_nowhere(prefill: Node, decode: Node):
    joined(prefill, decode)
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


def test_a_session_is_closed_when_its_life_has_let_go(prefill: Node, decode: Node):
    joined(prefill, decode)
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
def test_slots_of_a_node_that_took_nothing_for_a_while_are_used_again(context: TransportContext, decode: Node):
    clock, go_on = ManualClock(), threading.Event()
    prefill = Node(context, "impatient", clock=clock)
    joined(prefill, decode)
    decode.cache.before_write = lambda: go_on.wait(DEADLINE_S)
    stalled, pieces = pieces_of(prefill, decode, 1)
    decode.mover.expect(stalled, TABLE, 2, (1,))
    prefill.mover.send(pieces[0], TABLE, (1,))
    wait_until(lambda: prefill.posted.of(PieceSent))
    clock.advance(WINDOW.stall_s)
    prefill.mover.stop(key_between(prefill.self_id, OTHER))  # it looks at the clock
    wait_until(lambda: prefill.posted.of(KvSendFailed))
    assert prefill.posted.of(KvSendFailed) == [KvSendFailed(stalled, "the node takes no KV")]
    go_on.set()
    key, pieces = pieces_of(prefill, decode, 3, number=2)
    decode.mover.expect(key, TABLE, 2, (2,))
    for piece in pieces:
        prefill.mover.send(piece, TABLE, (2,))
    wait_until(lambda: len(decode.posted.of(PieceArrived)) == 4)
    assert decode.mover.counts()[1]["staged"] == 4
    prefill.close()
