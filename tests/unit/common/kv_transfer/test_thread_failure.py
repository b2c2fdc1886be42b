"""An exception in the KV thread or the engine thread is reported immediately and ends the node with the reason."""

import logging
from collections.abc import Iterator

import pytest

from kvferry.common.base.ids import new_incarnation
from kvferry.common.cluster.actions import ExitProcess
from kvferry.common.cluster.events import EngineFailed, Event, KvFailed, PiecesStopped
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


def test_a_kv_thread_that_cannot_start_reports_it(context: TransportContext, caplog: pytest.LogCaptureFixture):
    posted = Posted()
    incarnation, cache = new_incarnation(), MemoryCache()
    mover = ZmqKvMover(context, incarnation, "inproc://kv", cache, Limits(), posted, activate=broken)
    mover.start()
    wait_until(lambda: posted.all() == [LOST])
    mover.close()
    assert "the KV thread failed" in caplog.text


@pytest.mark.rule(10)
def test_a_kv_thread_that_fails_at_a_piece_reports_it_and_leaves_no_call_waiting(context: TransportContext):
    ends = []
    for name in ("a", "b"):
        incarnation, posted, cache = new_incarnation(), Posted(), MemoryCache()
        mover = ZmqKvMover(context, incarnation, f"inproc://{name}", cache, Limits(), posted)
        ends.append((incarnation, posted, cache, mover, mover.start()))
    (self_id, _, source, sender, _), (peer, events, cache, receiver, endpoint) = ends
    cache.before_write = broken
    key = key_between(self_id, peer)
    receiver.expect(key, (0, 1))
    sender.open(peer, endpoint)
    sender.send(piece_of(source, key, layers=(0, 4), tokens=(0, 8)), (0, 1))
    wait_until(lambda: LOST in events.all() and receiver._ended)
    receiver.stop(key)
    assert events.of(PiecesStopped) == [PiecesStopped(key)]
    sender.close()
    receiver.close()


@pytest.mark.rule(10)
def test_a_node_with_a_failed_kv_thread_exits_with_the_reason():
    bench = PrefillBench()
    ends = [action for action in bench.handle(LOST, 0.1) if isinstance(action, ExitProcess)]
    assert ends == [ExitProcess("the KV transfer failed: OSError: the device is lost", 1)]
    bench.job()
    assert bench.steps == []


def test_an_engine_that_cannot_bind_its_device_reports_it():
    posted: list[Event] = []
    engine = EngineThread(None, broken, posted.append, logging.getLogger("test"))  # type: ignore[arg-type]
    engine.start()
    assert engine.stop(PATIENCE_S)
    assert posted == [EngineFailed("binding to the device: OSError: the device is lost")]
