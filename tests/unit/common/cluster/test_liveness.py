"""Who counts as alive, on the link where it matters: rules 6, 9 and 10."""

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import CloseLink, OpenLink, Probe, ResetLink, SendHello
from kvferry.common.cluster.links import FORGET_AFTER_S, LinkState, LinkTable
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Hello, HelloRefused, Status, Welcome
from kvferry.common.protocol.model_info import Compatibility, ModelInfo
from tests.support.links import DrivenLinks

HERE, THERE = "tcp://node:1", "tcp://node:2"
LIFE, NEXT_LIFE = Incarnation("1" * 32), Incarnation("2" * 32)
WELCOME = Welcome(
    name="n",
    roles=("prefill",),
    model=ModelInfo(name="m", vocab_size=8, max_model_len=8, max_position_embeddings=8),
    compatibility=Compatibility(protocol_version=1, model="m", kv_dtype="f", kv_layout="l", block_size=4, num_layers=1),
)
TIMERS = Timers()


@pytest.fixture
def links():
    """One link that is up since 0.0."""
    table = LinkTable(Hello(kind="worker", name="w"), TIMERS)
    assert table.add(HERE, 0.0, static=True) == [OpenLink(HERE), SendHello(HERE, table.hello)]
    links = DrivenLinks(table)
    links.hear(HERE, LIFE, WELCOME, 0.0)
    return links


@pytest.fixture
def table(links):
    return links.table


def pass_time(
    links: DrivenLinks,
    start: float,
    end: float,
    *,
    steps_done: int | None = None,
    work: bool = True,
    progress_no: int = 0,
):
    """Ticks ten times a second; with steps_done the node is heard each time, and says so many steps."""
    actions = []
    for tick in range(round(start * 10) + 1, round(end * 10) + 1):
        now = tick / 10
        if steps_done is not None:
            links.heard(HERE, LIFE, now)
            status = Status(status_no=tick, steps_done=steps_done, work_waiting=work, progress_no=progress_no)
            links.status(links.table.links[HERE], status, now)
        actions += links.tick(now)
        links.table.check_invariants()
    return actions


@pytest.mark.rule(9)
def test_a_broken_connection_makes_suspect_and_a_probe_decides(links, table):
    assert links.closed(HERE, 0.5) == [Probe(HERE)]
    assert table.links[HERE].state is LinkState.SUSPECT
    assert not table.links[HERE].usable  # no new work
    assert table.links[HERE].up  # what is there stays
    assert links.closed(HERE, 0.6) == []  # one probe at a time
    links.probe(HERE, True, 0.7)
    assert links.take_lost() == [LIFE]
    assert links.take_lost() == []
    table.check_invariants()


@pytest.mark.rule(9)
def test_a_blip_is_no_death(links, table):
    links.closed(HERE, 0.5)
    links.probe(HERE, False, 0.6)
    links.connected(HERE, 0.7)
    links.heard(HERE, LIFE, 0.8)
    assert table.links[HERE].usable
    assert links.take_lost() == []


def test_a_refusal_of_a_link_that_was_heard_meanwhile_kills_no_node(links):
    links.closed(HERE, 0.5)
    links.heard(HERE, LIFE, 0.6)
    links.probe(HERE, True, 0.7)
    assert links.take_lost() == []


@pytest.mark.rule(9)
def test_death_is_noticed_within_dead_after(links, table):
    actions = pass_time(links, 0.0, TIMERS.dead_after_s)
    assert actions == [Probe(HERE)]
    assert links.take_lost() == []
    assert links.tick(TIMERS.dead_after_s + 0.1) == [ResetLink(HERE), SendHello(HERE, table.hello)]
    assert links.take_lost() == [LIFE]


@pytest.mark.rule(10)
def test_work_waiting_and_no_step_is_a_death_although_the_process_talks(links):
    """Rule 10: a wedged engine."""
    pass_time(links, 0.0, TIMERS.engine_stall_s, steps_done=7)
    assert links.take_lost() == []
    pass_time(links, TIMERS.engine_stall_s, TIMERS.engine_stall_s + 0.3, steps_done=7)
    assert links.take_lost() == [LIFE]


@pytest.mark.rule(10)
def test_a_long_step_that_comes_further_is_progress(links):
    """Rule 10, ADR 0027."""
    for layer in range(6):
        start = layer * TIMERS.engine_stall_s * 0.6
        pass_time(links, start, start + TIMERS.engine_stall_s * 0.6, steps_done=7, progress_no=layer)
    assert links.take_lost() == []


def test_who_is_lost_while_it_talks_is_known_to_live(links, table):
    """Until it is welcomed again, or dies."""
    pass_time(links, 0.0, TIMERS.engine_stall_s + 0.3, steps_done=7)
    assert links.take_lost() == [LIFE]
    assert table.is_wedged(LIFE)
    links.hear(HERE, LIFE, WELCOME, 11.0)
    assert not table.is_wedged(LIFE)
    pass_time(links, 11.0, 11.0 + TIMERS.dead_after_s + 0.3)
    assert links.take_lost() == [LIFE]
    assert not table.is_wedged(LIFE)


def test_an_idle_engine_is_healthy(links):
    pass_time(links, 0.0, 3 * TIMERS.engine_stall_s, steps_done=7, work=False)
    assert links.take_lost() == []


def test_the_newest_status_counts(links, table):
    link = table.links[HERE]
    links.status(link, Status(status_no=5, draining=True), 0.1)
    links.status(link, Status(status_no=4), 0.2)
    assert link.status is not None
    assert link.status.draining
    assert not link.usable


@pytest.mark.rule(6)
def test_a_refused_hello_names_its_reason_and_is_tried_again(links, table):
    """Rule 6."""
    refusal = HelloRefused(reason="block_size: 4 != 8")
    links.hear(HERE, LIFE, refusal, 0.1)
    link = table.links[HERE]
    assert (link.state, link.refusal) == (LinkState.REFUSED, refusal.reason)
    assert links.take_lost() == [LIFE]
    links.hear(HERE, LIFE, refusal, 0.2)
    assert SendHello(HERE, table.hello) in pass_time(links, 0.2, 0.9)
    links.hear(HERE, NEXT_LIFE, WELCOME, 1.0)
    assert link.usable
    assert link.refusal == ""
    table.check_invariants()


@pytest.mark.rule(11)
def test_a_node_that_is_not_announced_is_forgotten_when_it_is_long_dead(links, table):
    """Rule 11: silence of the proxies alone forgets no node; the configured ones are never forgotten."""
    table.add(THERE, 0.0)
    links.hear(THERE, NEXT_LIFE, WELCOME, 0.0)
    assert CloseLink(THERE) not in pass_time(links, 0.0, FORGET_AFTER_S)
    dead_since = table.links[THERE].dead_since
    actions = pass_time(links, FORGET_AFTER_S, dead_since + FORGET_AFTER_S + 1)
    assert actions.count(CloseLink(THERE)) == 1
    assert CloseLink(HERE) not in actions
    assert set(table.links) == {HERE}


@pytest.mark.rule(11)
def test_a_node_that_lives_is_not_forgotten_however_long_the_proxies_are_silent(links, table):
    """Rule 11: losing a proxy freezes what is known, it empties nothing."""
    table.links[HERE].static = False
    assert CloseLink(HERE) not in pass_time(links, 0.0, 2 * FORGET_AFTER_S, steps_done=1, work=False)
    assert table.links[HERE].usable


def test_an_announced_node_is_not_forgotten(links, table):
    table.add(THERE, 0.0)
    for minute in range(1, 4):
        table.add(THERE, 40.0 * minute)
        assert CloseLink(THERE) not in pass_time(links, 40.0 * (minute - 1), 40.0 * minute)


def test_one_link_a_life(links, table):
    """A second address of the same life gives no second link to it."""
    table.add(THERE, 0.1)
    assert links.hear(THERE, LIFE, WELCOME, 0.2) == []
    assert table.peer(LIFE) is table.links[HERE]
    assert table.links[THERE].state is LinkState.CONNECTING
    table.check_invariants()


def test_what_concerns_no_link_changes_nothing(links, table):
    assert links.connected(THERE, 0.1) == []
    assert links.closed(THERE, 0.1) == []
    assert links.probe(THERE, True, 0.1) == []
    assert links.hear(THERE, NEXT_LIFE, WELCOME, 0.1) == []
    assert links.heard(THERE, NEXT_LIFE, 0.1) == []
    links.hear(THERE, LIFE, HelloRefused(reason="no"), 0.1)
    assert set(table.links) == {HERE}
    assert links.take_lost() == []


def test_lives_long_followed_are_not_remembered(links, table):
    for number in range(3, 9):
        links.hear(HERE, Incarnation(f"{number}" * 32), WELCOME, 10.0 * number)
    assert len(table.links[HERE].past) == 1
    table.check_invariants()


def damage_peer(table):
    table.links[HERE].peer = NEXT_LIFE


def damage_index(table):
    table.by_peer.clear()


def damage_endpoint(table):
    table.links[THERE] = table.links.pop(HERE)
    table.by_peer.clear()


def damage_state(table):
    links = DrivenLinks(table)
    links.closed(HERE, 0.1)
    links.probe(HERE, True, 0.1)
    table.by_peer[LIFE] = table.links.pop(HERE)


@pytest.mark.parametrize("damage", [damage_peer, damage_index, damage_endpoint, damage_state])
def test_check_invariants_sees_every_kind_of_damage(table, damage):
    table.check_invariants()
    damage(table)
    with pytest.raises(InvariantError):
        table.check_invariants()
