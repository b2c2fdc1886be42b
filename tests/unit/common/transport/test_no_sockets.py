"""A process that runs out of sockets or threads: it logs what it cannot open, retries, and keeps running."""

import itertools
import logging
import threading
from collections.abc import Callable

import pytest
import zmq

from kvferry.common.base.errors import OutOfSocketsError
from kvferry.common.base.ids import new_incarnation
from kvferry.common.cluster.events import KvSendFailed, PieceSent
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
SOCKETS_LEFT = (0, 1, 2)
"""The number of sockets left for a link. It needs one, its monitor one, and ZeroMQ opens one to feed the monitor."""
TABLE = (3, 1, 6)


@pytest.mark.rule(8)
@pytest.mark.parametrize("left_over", SOCKETS_LEFT)
def test_links_beyond_the_limit_wait_until_one_is_closed(
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
        endpoints = [f"inproc://absent-{number}" for number in range(12)]
        for endpoint in endpoints:
            links.open(endpoint)
        opened = list(links.endpoints())
        assert 0 < len(opened) < len(endpoints)
        assert len(context.open_sockets()) == 2 * len(opened)  # no link is half open
        waiting = endpoints[len(opened)]
        for _ in range(3):
            links.send_unaddressed(waiting, HELLO)
        assert list(links.endpoints()) == opened
        logged = [record.getMessage() for record in caplog.records]
        assert len(logged) == len(endpoints) - len(opened)  # once each, however often it is retried
        assert all("ulimit -n" in text for text in logged)
        for endpoint in opened:
            links.close(endpoint)
        # ZeroMQ's own thread releases a closed socket some time later.
        wait_until(lambda: waiting in links.endpoints(), step=lambda: links.send_unaddressed(waiting, HELLO))
        links.close_all()


def test_the_error_names_the_socket(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(context_module, "MAX_SOCKETS", 1)
    with transport_context() as context:
        only = context.open_socket(zmq.PAIR, "the only socket")
        with pytest.raises(OutOfSocketsError, match=r"cannot open node socket at x: Too many open files; .*ulimit -n"):
            context.open_socket(zmq.PAIR, "node socket at x")
        context.close_socket(only)


@pytest.mark.rule(8)
@pytest.mark.parametrize("left_over", SOCKETS_LEFT)
def test_a_kv_link_that_cannot_be_opened_fails_its_pieces_and_is_retried_with_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left_over: int
):
    cache, posted = MemoryCache(), Posted()
    with closing() as stack:
        theirs, ours = opened(stack), opened(stack)
        self_id, you = new_incarnation(), new_incarnation()
        receiver = ZmqKvMover(theirs, you, "tcp://127.0.0.1:0", MemoryCache(), Limits(), Posted())
        endpoint = receiver.start()
        monkeypatch.setattr(
            TransportContext, "prepare_zero_copy", lambda self: None
        )  # already done; its sockets would count
        monkeypatch.setattr(context_module, "MAX_SOCKETS", 4)
        sender = ZmqKvMover(ours, self_id, "inproc://sender", cache, Limits(), posted)
        sender.start()
        others = [ours.open_socket(zmq.PAIR, "unrelated") for _ in range(3 - left_over)]
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
        (logged,) = [record.getMessage() for record in caplog.records]
        assert f"cannot open link to {endpoint}: Too many open files; " in logged
        for other in others:
            ours.close_socket(other)
        wait_until(lambda: posted.of(PieceSent), step=send)
        receiver.close()
        sender.close()


def test_without_a_thread_a_probe_is_unknown_and_the_node_keeps_running(
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
    assert results == []  # only from the loop, as usual
    for call in calls:
        call()
    assert results == [ProbeResult.UNKNOWN] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "cannot probe tcp://127.0.0.1:1: can't start new thread"
    ]
