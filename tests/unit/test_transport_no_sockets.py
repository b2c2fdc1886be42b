"""A process that has no socket left: links that it cannot have are told of and tried again; nothing ends by it."""

import logging

import pytest
import zmq

from common.config.protocol import Limits, Timers
from common.errors import OutOfSocketsError
from common.ids import new_incarnation
from common.node.poll_watcher import PollWatcher
from common.protocol.messages import Hello
from common.transport import context as context_module
from common.transport.client_links import ClientLinks
from common.transport.poll_loop import PollLoop
from tests.support.transport import transport_context, wait_until

HELLO = Hello(kind="worker", name="w")


def test_links_beyond_what_there_is_wait_until_one_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(context_module, "MAX_SOCKETS", 12)
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
