"""A node's view of its clients and their lists: rules 12 to 15."""

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.clients import FORGOTTEN_KEPT, ClientTable
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Heartbeat, WantedRequest

WORKER, PREFILL = Incarnation("1" * 32), Incarnation("2" * 32)
REQUEST = RequestId("a" * 32)


def entry(attempt: int = 1, generation: int = 0) -> WantedRequest:
    return WantedRequest(request_id=REQUEST, attempt=attempt, next_index=0, expected=True, generation=generation)


@pytest.fixture
def table():
    return ClientTable(Timers())


@pytest.fixture
def client(table):
    return table.hello(WORKER, "worker", "w", 0.0)


@pytest.mark.rule(12)
def test_the_newest_list_counts_in_whatever_order_they_come(client):
    assert client.update_wanted(Heartbeat(heartbeat_no=2, as_of=5, wanted=(entry(),)), 1.0)
    assert not client.update_wanted(Heartbeat(heartbeat_no=1, as_of=9), 2.0)
    assert not client.update_wanted(Heartbeat(heartbeat_no=2, as_of=9), 3.0)
    assert (client.as_of, set(client.wanted)) == (5, {REQUEST})
    assert client.last_heard == 3.0  # it lives all the same
    assert client.last_heartbeat == 1.0


@pytest.mark.rule(13)
def test_what_is_younger_than_the_list_is_wanted(client):
    client.update_wanted(Heartbeat(heartbeat_no=1, as_of=5), 1.0)
    assert client.wants(6, REQUEST, 1)
    assert not client.wants(5, REQUEST, 1)


@pytest.mark.rule(2)
def test_only_the_listed_attempt_and_generation_are_wanted(client):
    client.update_wanted(Heartbeat(heartbeat_no=1, as_of=5, wanted=(entry(attempt=2, generation=3),)), 1.0)
    assert client.wants(4, REQUEST, 2, 3)
    assert not client.wants(4, REQUEST, 1, 3)
    assert not client.wants(4, REQUEST, 2, 2)


def test_hello_again_changes_nothing_that_is_held(table, client):
    client.update_wanted(Heartbeat(heartbeat_no=4, as_of=5, wanted=(entry(),)), 1.0)
    assert table.hello(WORKER, "worker", "w", 2.0) is client
    assert client.heartbeat_no == 4
    assert client.last_heard == 2.0


def test_only_the_silent_are_taken_out_and_once(table, client):
    table.hello(PREFILL, "prefill", "p", 1.0)
    assert [c.name for c in table.workers()] == ["w"]
    assert table.take_silent(3.0) == []
    assert table.take_silent(3.1) == [client]
    assert table.take_silent(3.1) == []
    assert table.get(WORKER) is None
    assert table.get(PREFILL) is not None
    table.check_invariants()


def test_who_slept_blames_no_client(table, client):
    """Rule 9: what was not heard meanwhile does not count, and the worker counts as heard lately enough to take
    reservations for it."""
    client.update_wanted(Heartbeat(heartbeat_no=1, as_of=0), 0.1)
    quiet = table.hello(PREFILL, "prefill", "p", 0.0)
    table.forgive(49.5, 50.0)
    assert table.take_silent(52.4) == []
    assert 50.0 - client.last_heartbeat < Timers().worker_timeout_s
    assert quiet.last_heartbeat < 0  # one that never sent a list still has not


@pytest.mark.rule(9)
def test_the_silence_before_a_sleep_keeps_its_age(table, client):
    """Rule 9."""
    heard = table.hello(PREFILL, "prefill", "p", 49.9)  # its message waited in the inbox
    table.forgive(47.5, 50.0)
    assert heard.last_heard == 50.0
    assert table.take_silent(50.4) == []
    assert table.take_silent(50.6) == [client]


def test_a_client_that_said_its_last_word_is_no_returning_one(table, client):
    table.remove(WORKER)
    table.remove(WORKER)
    assert not table.hello(WORKER, "worker", "w", 1.0).returned


def test_of_the_forgotten_only_the_latest_are_remembered(table):
    lives = [Incarnation(f"{number:032x}") for number in range(FORGOTTEN_KEPT + 1)]
    for number, life in enumerate(lives):
        table.hello(life, "worker", "w", float(number) / 1e4)
    table.take_silent(100.0)
    assert not table.hello(lives[0], "worker", "w", 100.0).returned
    assert table.hello(lives[-1], "worker", "w", 100.0).returned


def test_damage_is_seen(table, client):
    table.clients[PREFILL] = client
    with pytest.raises(InvariantError, match="filed under"):
        table.check_invariants()
