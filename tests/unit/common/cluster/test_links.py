"""The client's side of links: who lives at an address, and what a node says that has forgotten its client."""

import pytest

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import BindPeer, CloseLink, OpenLink, SendHello
from kvferry.common.cluster.links import MOST_LINKS, LinkState, LinkTable
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Hello, Status, Welcome
from kvferry.common.protocol.model_info import Compatibility, ModelInfo
from tests.support.links import DrivenLinks

HERE = "tcp://node:1"
OLD, NEW = Incarnation("1" * 32), Incarnation("2" * 32)
WELCOME = Welcome(
    name="n",
    roles=("prefill",),
    model=ModelInfo(name="m", vocab_size=8, max_model_len=8, max_position_embeddings=8),
    compatibility=Compatibility(protocol_version=1, model="m", kv_dtype="f", kv_layout="l", block_size=4, num_layers=1),
)


def make_table() -> LinkTable:
    return LinkTable(Hello(kind="worker", name="w"), Timers())


@pytest.mark.rule(12)
def test_a_node_that_forgot_its_client_gets_hello_again():
    """Rule 12: no client: asks for Hello. The node has lost all it had for us, so it must know us first."""
    table = make_table()
    links = DrivenLinks(table)
    table.add(HERE, 0.0)
    links.hear(HERE, OLD, WELCOME, 0.1)
    assert links.heard(HERE, OLD, 4.0) == []
    assert links.heard(HERE, OLD, 4.0, unknown=True) == [SendHello(HERE, table.hello)]
    assert links.heard(HERE, OLD, 4.01, unknown=True) == []  # each of our messages is answered so
    assert links.heard(HERE, OLD, 4.6, unknown=True) == [SendHello(HERE, table.hello)]
    assert links.take_lost() == []
    table.check_invariants()


@pytest.mark.rule(1)
def test_what_comes_late_from_an_earlier_life_changes_nothing():
    """Rule 1, and invariant 7: a new incarnation ends the old one, never the other way round."""
    table = make_table()
    links = DrivenLinks(table)
    table.add(HERE, 0.0)
    links.hear(HERE, OLD, WELCOME, 0.1)
    assert BindPeer(HERE, NEW) in links.hear(HERE, NEW, WELCOME, 1.0)
    assert links.take_lost() == [OLD]
    assert links.heard(HERE, OLD, 1.1) == []
    assert links.hear(HERE, OLD, WELCOME, 1.2) == []
    assert links.take_lost() == []
    assert table.peer(NEW) is not None
    assert table.peer(OLD) is None
    table.check_invariants()


def test_two_incarnations_welcomed_in_the_wrong_order_are_distinguished_in_the_end():
    """The Welcome of an ended incarnation may arrive after that of the next one: the live one sends again."""
    table = make_table()
    links = DrivenLinks(table)
    table.add(HERE, 0.0)
    links.hear(HERE, NEW, WELCOME, 1.0)
    links.hear(HERE, OLD, WELCOME, 1.1)
    assert table.peer(OLD) is not None
    links.hear(HERE, NEW, WELCOME, 4.0)
    assert table.peer(NEW) is not None
    assert table.peer(OLD) is None
    table.check_invariants()


@pytest.mark.rule(1)
def test_another_incarnation_ends_the_one_before_immediately():
    table = make_table()
    links = DrivenLinks(table)
    table.add(HERE, 0.0)
    links.hear(HERE, OLD, WELCOME, 0.1)
    assert SendHello(HERE, table.hello) in links.heard(HERE, NEW, 0.2)
    assert links.take_lost() == [OLD]
    assert table.links[HERE].state is LinkState.DEAD
    table.check_invariants()


def test_a_welcome_starts_the_count_of_token_messages_again():
    """A node that forgot us counts from one again; with the old number kept a lost last message would go unseen."""
    table = make_table()
    links = DrivenLinks(table)
    table.add(HERE, 0.0)
    links.hear(HERE, OLD, WELCOME, 0.1)
    link = table.links[HERE]
    link.link_seq = 37
    links.hear(HERE, OLD, WELCOME, 5.0)
    assert link.link_seq == 0


@pytest.mark.rule(9)
def test_silence_makes_suspect_then_dead_and_a_late_own_tick_forgives():
    timers, table = Timers(), make_table()
    links = DrivenLinks(table)
    table.add(HERE, 0.0)
    links.hear(HERE, OLD, WELCOME, 0.0)
    link = table.links[HERE]
    links.status(link, Status(status_no=1), 0.0)
    now = 0.0
    while now < timers.suspect_s + 0.2:
        now += 0.1
        links.tick(now)
    assert link.state is LinkState.SUSPECT
    now += 60.0  # this process slept: it judges no node by that
    links.tick(now)
    assert links.take_lost() == []
    lost: list[Incarnation] = []
    while not lost:
        now += 0.1
        links.tick(now)
        lost = links.take_lost()
    awake_s = now - 60.0  # the silence before the sleep continues after it
    assert awake_s + timers.heartbeat_s == pytest.approx(timers.dead_after_s, abs=0.11)
    assert lost == [OLD]
    table.check_invariants()


@pytest.mark.rule(9)
@pytest.mark.parametrize("gap_s", [0.4, 0.6, 3.0])
def test_who_is_always_late_notices_a_silence_too(gap_s):
    """Rule 9: of each late tick one heartbeat interval counts."""
    timers, table = Timers(), make_table()
    links = DrivenLinks(table)
    table.add(HERE, 0.0)
    links.hear(HERE, OLD, WELCOME, 0.0)
    links.tick(0.0)
    ticks = 0
    while table.links[HERE].up and ticks < 100:
        ticks += 1
        links.tick(gap_s * ticks)
    assert ticks == timers.dead_after_s // min(gap_s, timers.heartbeat_s) + 1


def test_what_waited_for_who_slept_is_heard_now():
    table = make_table()
    links = DrivenLinks(table)
    table.add(HERE, 0.0)
    links.hear(HERE, OLD, WELCOME, 0.0)
    links.tick(0.0)
    links.heard(HERE, OLD, 60.0)
    links.tick(60.0)
    assert table.links[HERE].last_heard == 60.0


@pytest.mark.rule(11)
def test_named_nodes_without_end_cost_no_links_without_end():
    """Any announcer may name any endpoint: links that never answered are replaced, others are not."""
    table = make_table()
    links = DrivenLinks(table)
    table.add(HERE, 0.0)
    links.hear(HERE, OLD, WELCOME, 0.1)
    table.add("tcp://fixed:1", 0.0, static=True)
    for number in range(MOST_LINKS):
        actions = table.add(f"tcp://silent:{number}", 1.0 + number)
        assert OpenLink(f"tcp://silent:{number}") in actions
        assert len(table.links) <= MOST_LINKS
    assert CloseLink("tcp://silent:1") in actions
    assert {HERE, "tcp://fixed:1"} <= set(table.links)
    assert table.add("tcp://another:1", 5.0, static=True)  # what is configured is always had
    table.check_invariants()


def test_a_node_too_many_is_not_taken_where_all_others_answered():
    table = make_table()
    links = DrivenLinks(table)
    for number in range(MOST_LINKS):
        table.add(f"tcp://node:{number}", 0.0)
        links.hear(f"tcp://node:{number}", Incarnation(f"{number:032x}"), WELCOME, 0.1)
    assert table.add("tcp://late:1", 1.0) == []
    assert len(table.by_peer) == MOST_LINKS
    table.check_invariants()
