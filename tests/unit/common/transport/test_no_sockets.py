"""A process that has no socket or thread left: what it cannot have is told of and tried again; nothing ends by it."""

import itertools
import logging
import threading
from collections.abc import Callable

import pytest
import zmq

from kvferry.common.base.errors import OutOfSocketsError
from kvferry.common.base.ids import new_incarnation
from kvferry.common.cluster.events import (
    KvSendFailed,
    PieceSent,
)
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv_transfer.zmq_backend import ZmqKvMover
from kvferry.common.protocol.messages import Hello
from kvferry.common.transport import context as context_module
from kvferry.common.transport.client_links import ClientLinks
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.poll_watcher import PollWatcher
from kvferry.common.transport.probe import ProbeResult
from tests.support.kv_memory import MemoryCache, Posted, key_between, piece_of
from tests.support.transport import closing, opened, transport_context, wait_until

HELLO = Hello(kind="worker", name="w")
LACKING = (0, 1, 2)
"""So many sockets are left for a link: it needs one, one for its monitor, and ZeroMQ makes one more to feed that."""
TABLE = (3, 1, 6)


@pytest.mark.rule(8)
@pytest.mark.parametrize("left_over", LACKING)
def test_links_beyond_what_there_is_wait_until_one_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left_over: int
):
    monkeypatch.setattr(context_module, "MAX_SOCKETS", 12 + left_over)
    with transport_context() as context:
        links = ClientLinks(
            context,
            new_incarnation(),
            Limits(),
            Timers(),
            PollWatcher(PollLoop(), lambda call: call()),
            lambda event: None,
            logging.getLogger("tests.links"),
        )
        endpoints = [f"inproc://nobody-{number}" for number in range(12)]
        for endpoint in endpoints:
            links.open(endpoint)
        opened = list(links.endpoints())
        assert 0 < len(opened) < len(endpoints)
        assert len(context.open_sockets()) == 2 * len(opened)  # nothing half made
        waiting = endpoints[len(opened)]
        for _ in range(3):
            links.send_unaddressed(waiting, HELLO)
        assert list(links.endpoints()) == opened
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == len(endpoints) - len(opened)  # once each, however often it is tried
        assert all("ulimit -n" in text for text in told)
        for endpoint in opened:
            links.close(endpoint)
        # A socket that is closed is given back by ZeroMQ's own thread, some time.
        wait_until(lambda: waiting in links.endpoints(), step=lambda: links.send_unaddressed(waiting, HELLO))
        links.close_all()


def test_what_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(context_module, "MAX_SOCKETS", 1)
    with transport_context() as context:
        only = context.open_socket(zmq.PAIR, "the only one")
        with pytest.raises(OutOfSocketsError, match=r"no node socket at x: Too many open files \(see"):
            context.open_socket(zmq.PAIR, "node socket at x")
        context.close_socket(only)


@pytest.mark.rule(8)
@pytest.mark.parametrize("left_over", LACKING)
def test_a_kv_link_that_cannot_be_had_fails_its_pieces_and_is_tried_again_with_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left_over: int
):
    cache, posted = MemoryCache(), Posted()
    with closing() as stack:
        theirs, ours = opened(stack), opened(stack)
        self_id, you = new_incarnation(), new_incarnation()
        receiver = ZmqKvMover(theirs, you, "tcp://127.0.0.1:0", MemoryCache(), Limits(), Posted())
        endpoint = receiver.start()
        monkeypatch.setattr(TransportContext, "prepare_zero_copy", lambda self: None)  # done, and its sockets count
        monkeypatch.setattr(context_module, "MAX_SOCKETS", 4)
        sender = ZmqKvMover(ours, self_id, "inproc://sender", cache, Limits(), posted)
        sender.start()
        others = [ours.open_socket(zmq.PAIR, "another's") for _ in range(3 - left_over)]
        key = key_between(self_id, you)
        receiver.expect(key, TABLE)
        sender.open(you, endpoint)
        numbers = itertools.count()

        def send() -> None:
            sender.send(piece_of(cache, key, next(numbers), layers=(0, 4), tokens=(0, 4)), TABLE)

        for _ in range(3):
            send()
        wait_until(lambda: posted.all() == [KvSendFailed(key, "no link to this node")] * 3)
        assert len(ours.open_sockets()) == 1 + len(others)
        (told,) = [record.getMessage() for record in caplog.records]
        assert told.startswith(f"no KV can be sent: no link to {endpoint}: Too many open files (see")
        for other in others:
            ours.close_socket(other)
        wait_until(lambda: posted.of(PieceSent), step=send)
        receiver.close()
        sender.close()


def test_without_a_thread_a_probe_finds_nothing_out_and_the_node_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    calls: list[Callable[[], None]] = []
    results: list[ProbeResult] = []
    watcher = PollWatcher(PollLoop(), calls.append)
    for _ in range(2):
        watcher.probe("tcp://127.0.0.1:1", 1.0, results.append)
    assert results == []  # from the loop, as ever
    for call in calls:
        call()
    assert results == [ProbeResult.UNKNOWN] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "tcp://127.0.0.1:1 cannot be probed: can't start new thread"
    ]
