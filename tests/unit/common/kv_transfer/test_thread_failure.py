"""The KV thread or the engine thread ends by an exception: it says so at once, and the node ends with the reason."""

import logging
from collections.abc import Iterator

import pytest

from kvferry.common.base.ids import new_incarnation
from kvferry.common.cluster.actions import ExitProcess
from kvferry.common.cluster.events import (
    EngineFailed,
    Event,
    KvFailed,
    PiecesStopped,
)
from kvferry.common.config.protocol import Limits
from kvferry.common.engine.engine_thread import EngineThread
from kvferry.common.kv_transfer.zmq_backend import ZmqKvMover
from kvferry.common.transport.context import TransportContext
from tests.support.eventually import PATIENCE_S
from tests.support.kv_memory import MemoryCache, Posted, key_between, piece_of
from tests.support.prefill_bench import PrefillBench
from tests.support.transport import transport_context, wait_until

LOST = KvFailed("OSError: the device is lost")


@pytest.fixture
def context() -> Iterator[TransportContext]:
    with transport_context() as made:
        yield made


def broken(*_: object) -> None:
    raise OSError("the device is lost")


def test_a_kv_thread_that_cannot_begin_says_so(context: TransportContext, caplog: pytest.LogCaptureFixture):
    posted = Posted()
    own, cache = new_incarnation(), MemoryCache()
    mover = ZmqKvMover(context, own, "inproc://kv", cache, Limits(), posted, activate=broken)
    mover.start()
    wait_until(lambda: posted.all() == [LOST])
    mover.close()
    assert "the KV thread failed" in caplog.text


@pytest.mark.rule(10)
def test_a_kv_thread_that_fails_at_a_piece_says_so_and_nobody_waits_for_it(context: TransportContext):
    ends = []
    for name in ("a", "b"):
        own, posted, cache = new_incarnation(), Posted(), MemoryCache()
        mover = ZmqKvMover(context, own, f"inproc://{name}", cache, Limits(), posted)
        ends.append((own, posted, cache, mover, mover.start()))
    (self_id, _, mine, sender, _), (you, told, cache, receiver, endpoint) = ends
    cache.before_write = broken
    key = key_between(self_id, you)
    receiver.expect(key, (0, 1))
    sender.open(you, endpoint)
    sender.send(piece_of(mine, key, layers=(0, 4), tokens=(0, 8)), (0, 1))
    wait_until(lambda: LOST in told.all() and receiver._ended)
    receiver.stop(key)
    assert told.of(PiecesStopped) == [PiecesStopped(key)]
    sender.close()
    receiver.close()


@pytest.mark.rule(10)
def test_a_node_whose_kv_thread_failed_ends_with_the_reason():
    bench = PrefillBench()
    ends = [action for action in bench.handle(LOST, 0.1) if isinstance(action, ExitProcess)]
    assert ends == [ExitProcess("moving KV failed: OSError: the device is lost", 1)]
    bench.job()
    assert bench.steps == []


def test_an_engine_that_cannot_bind_its_device_says_so():
    posted: list[Event] = []
    engine = EngineThread(None, broken, posted.append, logging.getLogger("test"))  # type: ignore[arg-type]
    engine.start()
    assert engine.stop(PATIENCE_S)
    assert posted == [EngineFailed("binding to the device: OSError: the device is lost")]
