"""Measures the KV transfer between two processes of this host: `python -m kvferry.ops.bench.kv_transfer`.

Uses the real movers, caches in host memory, and checksums (the default). A second process sends; both ends run at the
same time, on two cores if there are two. The rate is bytes received over the time from the first piece sent to the
last one written.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation, RequestId, TransferKey
from kvferry.common.base.python_command import python_command
from kvferry.common.cluster.events import KvSendFailed, PieceArrived, PieceBad
from kvferry.common.config.protocol import Limits
from kvferry.common.kv_transfer.interface import KvEvent
from kvferry.common.kv_transfer.shm import ShmReach, ShmSlots
from kvferry.common.kv_transfer.zmq_backend import ZmqKvMover
from kvferry.common.protocol.messages import Piece
from kvferry.common.transport.context import TransportContext
from kvferry.ops.cli.numbers import positive

SENDER, RECEIVER = Incarnation("1" * 32), Incarnation("2" * 32)
KEY = TransferKey(RequestId("3" * 32), 1, 1, SENDER, RECEIVER)
SLOTS = tuple(range(Limits().staging_slots_per_transfer))
TIMEOUT_S = 120.0
CACHE_BYTES = 33_554_432
PIECE_SIZES = (65_536, 1_048_576)


@dataclass(slots=True)
class BenchHostCache:
    """A cache of bytes where position p of layer 0 is byte p: a read and a write are one copy each."""

    memory: bytearray

    def read(self, _from: int, _to: int, _table: Sequence[int], start: int, end: int) -> memoryview:
        """See BlockBytes."""
        return memoryview(bytes(memoryview(self.memory)[start:end]))

    def write(
        self, _from: int, _to: int, _table: Sequence[int], start: int, end: int, data: bytes | bytearray | memoryview
    ) -> None:
        """See BlockBytes."""
        self.memory[start:end] = data


@dataclass(slots=True)
class Counter:
    """Waits for `wanted` pieces."""

    wanted: int
    done: threading.Event = field(default_factory=threading.Event)
    fault: str = ""
    _arrived: int = 0

    def __call__(self, event: KvEvent) -> None:
        """Count an event of the mover."""
        if isinstance(event, PieceBad | KvSendFailed):
            self.fault = str(event)
            self.done.set()
        if isinstance(event, PieceArrived):
            self._arrived += 1
            if self._arrived == self.wanted:
                self.done.set()

    def wait(self) -> None:
        """Return when all have arrived. Raises RuntimeError after TIMEOUT_S, or if a piece was bad."""
        if not self.done.wait(TIMEOUT_S) or self.fault:
            raise RuntimeError(self.fault or f"{self._arrived} of {self.wanted} pieces in {TIMEOUT_S:g} s")


@dataclass(frozen=True, slots=True)
class TransferLoad:
    """The pieces to transfer."""

    piece_bytes: int
    num_pieces: int
    transport: str

    @property
    def cache_bytes(self) -> int:
        """Size of the cache; pieces wrap around in it."""
        return max(1, CACHE_BYTES // self.piece_bytes) * self.piece_bytes

    def piece(self, number: int) -> Piece:
        """Piece `number`, without data."""
        start = number * self.piece_bytes % self.cache_bytes
        return Piece(
            key=KEY,
            number=number,
            layer_start=0,
            layer_end=1,
            token_start=start,
            token_end=start + self.piece_bytes,
            num_bytes=self.piece_bytes,
        )

    @property
    def slots(self) -> tuple[int, ...]:
        """Staging slots that the sender may write to."""
        return SLOTS if self.transport == "shm" else ()


@contextlib.contextmanager
def mover(
    self_id: Incarnation, load: TransferLoad, post: Callable[[KvEvent], None]
) -> Iterator[tuple[ZmqKvMover, str]]:
    """A running mover, and its endpoint."""
    context = TransportContext()
    made = ZmqKvMover(
        context,
        self_id,
        "tcp://127.0.0.1:*",
        BenchHostCache(bytearray(os.urandom(load.piece_bytes)) * (load.cache_bytes // load.piece_bytes)),
        Limits(),
        post,
        checksum=True,
        memory=ShmSlots(len(SLOTS), load.piece_bytes),
        reach=ShmReach(self_id),
    )
    try:
        yield made, made.start()
    finally:
        made.close()
        context.close()


def send(load: TransferLoad, endpoint: str, place: str) -> None:
    """The sending process: sends one piece as warm-up, all pieces after a line on stdin, and prints its CPU seconds
    after another line."""
    with mover(SENDER, load, lambda _: None) as (made, _):
        made.open(RECEIVER, endpoint, staging=place)
        made.send(load.piece(load.num_pieces), (), load.slots)
        sys.stdin.readline()
        started = time.process_time()
        for number in range(load.num_pieces):
            made.send(load.piece(number), (), load.slots)
        sys.stdin.readline()
        sys.stdout.write(f"{time.process_time() - started}\n")
        sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class TransferRate:
    """Result of one round."""

    mb_per_s: float
    cpu_ms_per_mb: float
    """CPU time of both ends; other processes hardly change it."""


def measure_transfer(load: TransferLoad) -> TransferRate:
    """Run one round. Raises RuntimeError if a piece is missing or bad, or took the wrong transport."""
    warm, counter = Counter(1), Counter(load.num_pieces + 1)

    def post(event: KvEvent) -> None:
        warm(event)
        counter(event)

    with mover(RECEIVER, load, post) as (made, endpoint):
        made.expect(KEY, (), 0, load.slots)
        command = python_command("kvferry.ops.bench.kv_transfer", "--send", endpoint, made.staging_place)
        command += ("--pieces", str(load.piece_bytes), str(load.num_pieces), "--transport", load.transport)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
            try:
                warm.wait()
                started, cpu_started = time.perf_counter(), time.process_time()
                _write(sender, "go\n")
                counter.wait()
                elapsed, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
                cpu_s += float(sender.communicate("done\n")[0])
            finally:
                sender.kill()
        staged = made.counts()[1]["staged"]
    if bool(load.slots) != (staged > 0):
        raise RuntimeError(f"{staged} pieces arrived through staging slots, with transport {load.transport}")
    megabytes = load.piece_bytes * load.num_pieces / 1e6
    return TransferRate(megabytes / elapsed, 1000 * cpu_s / megabytes)


def _write(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def main() -> int:
    """Print a line for each transport and piece size."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.ops.bench.kv_transfer", description=__doc__)
    parser.add_argument("--mib", type=positive, default=512, help="MiB to transfer in each round (512)")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds of each measurement (5)")
    parser.add_argument("--send", nargs=2, metavar=("ENDPOINT", "PLACE"), help=argparse.SUPPRESS)
    parser.add_argument("--pieces", nargs=2, type=int, default=(0, 0), help=argparse.SUPPRESS)
    parser.add_argument("--transport", choices=("shm", "zmq"), default="zmq", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send is not None:
        send(TransferLoad(arguments.pieces[0], arguments.pieces[1], arguments.transport), *arguments.send)
        return 0
    for piece_bytes in PIECE_SIZES:
        for transport in ("shm", "zmq"):
            load = TransferLoad(piece_bytes, arguments.mib * 1_048_576 // piece_bytes, transport)
            rounds = [measure_transfer(load) for _ in range(arguments.rounds)]
            rates = sorted(result.mb_per_s for result in rounds)
            cpu = statistics.median(result.cpu_ms_per_mb for result in rounds)
            sys.stdout.write(
                f"{transport}, pieces of {piece_bytes // 1024} KiB: median {statistics.median(rates):.0f} MB/s, "
                f"{rates[0]:.0f} to {rates[-1]:.0f}; {cpu:.2f} ms of CPU per MB\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
