"""What was granted can be taken back while it is not committed: rule 28, at decode node, prefill node and worker."""

import pytest

from kvferry.common.base.ids import RequestId
from kvferry.common.cluster.actions import ForgetPieces
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import CommitRefused, Granted, HandoverFailed, Queued, Reserve, Revoke
from kvferry.common.scheduling.sequence import SchedulerConfig
from kvferry.router.core.request import RequestState
from tests.support.prefill_bench import DECODES, PrefillBench
from tests.unit.decode_node.test_decode import REQUEST, Bench, said
from tests.unit.decode_node.test_decode_ends import OTHERS, make_bench, run, spoken, step
from tests.unit.router.core.test_router import Bench as RouterBench
from tests.unit.router.core.test_router_losses import failed
from tests.unit.router.core.test_router_losses import request as request_at

IDLE_S = Timers().grant_idle_timeout_s


def revoked(actions) -> list[tuple[RequestId, str]]:
    return [(message.key.request_id, message.reason) for message in said(actions, Revoke)]


# -- a better class


@pytest.mark.rule(28)
def test_worse_reservations_give_way_to_a_better_class_the_youngest_of_the_worst_first():
    bench = make_bench(num_blocks=12)
    for number, priority in ((0, 4), (1, 5), (2, 5)):
        bench.reserve(0.1 + number, key=bench.key(request=OTHERS[number]), priority=priority)
        bench.heartbeat_of_worker(0.1 + number, as_of=0)
    better = bench.key(request=REQUEST)
    actions = bench.reserve(3.0, key=better, priority=1)
    assert revoked(actions) == [(OTHERS[2], "priority")]
    assert ForgetPieces(bench.key(request=OTHERS[2])) in actions
    assert [type(message) for message in said(actions, Queued | Granted)] == [Queued, Granted]
    held = {entry.key.request_id for entry in bench.role.entries if entry.revocation is None}
    assert held == {OTHERS[0], OTHERS[1], REQUEST}


@pytest.mark.rule(28)
def test_what_was_revoked_is_not_granted_again():
    """By a late copy of its Reserve: pieces of the first grant, still under way, would be taken for the second's."""
    bench = make_bench(num_blocks=4)
    key = bench.key(request=OTHERS[1])
    bench.reserve(0.1, key=key, priority=5)
    taken = bench.reserve(0.2, key=bench.key(request=REQUEST), priority=1)
    assert revoked(taken) == [(OTHERS[1], "priority")]
    again = bench.reserve(0.3, key=key, priority=5)
    assert (revoked(again), said(again, Granted)) == ([(OTHERS[1], "priority")], [])
    assert said(bench.commit(0.4, key=key), CommitRefused) != []
    assert not bench.role.knows(OTHERS[1], key.attempt)
    later = key._replace(generation=key.generation + 1)
    assert said(bench.reserve(0.5, key=later, priority=5), Queued) != []


def test_an_equal_class_does_not_give_way():
    bench = make_bench(num_blocks=4)
    bench.reserve(priority=3)
    assert revoked(bench.reserve(0.2, key=bench.key(request=OTHERS[1]), priority=3)) == []


@pytest.mark.rule(28)
def test_who_has_waited_long_does_not_give_way():
    """Rule 17 holds here as well: a class is raised by waiting."""
    bench = make_bench(num_blocks=4)
    bench.reserve(0.1, priority=3)
    bench.heartbeat_of_worker(21.0, as_of=0)
    assert revoked(bench.reserve(21.0, key=bench.key(request=OTHERS[1]), priority=1)) == []


@pytest.mark.rule(28)
def test_what_is_committed_is_never_taken_back():
    bench = make_bench(num_blocks=3)
    bench.reserve(priority=5)
    bench.commit()
    assert revoked(bench.reserve(0.3, key=bench.key(request=OTHERS[1]), priority=1)) == []


@pytest.mark.rule(28)
def test_no_reservation_gives_way_when_that_would_not_make_room():
    bench = make_bench(num_blocks=7)
    run(bench)
    step(bench, 0.3)  # it holds two blocks and decodes
    bench.reserve(0.4, key=bench.key(request=OTHERS[1]), priority=5)
    long = bench.key(request=OTHERS[2])
    message = bench.message(long, prompt=24, priority=1)
    actions = bench.done(bench.role.on_message(bench.prefill, message, 0.5), 0.5)
    assert [type(action.message) for action in actions] == [Queued]


# -- time


@pytest.mark.rule(28)
def test_a_grant_that_is_not_used_is_taken_back_while_others_wait():
    bench = make_bench(num_blocks=4)
    bench.reserve(0.1)
    waiting = bench.key(request=OTHERS[1])
    bench.reserve(0.2, key=waiting)
    assert bench.done(bench.role.tick(0.1 + IDLE_S), 0.1 + IDLE_S) == []
    actions = bench.done(bench.role.tick(0.2 + IDLE_S), 0.2 + IDLE_S)
    assert revoked(actions) == [(REQUEST, "time")]
    assert [granted.key for granted in said(actions, Granted)] == [waiting]


def test_a_grant_whose_pieces_come_is_used():
    bench = make_bench(num_blocks=4)
    bench.reserve(0.1)
    bench.reserve(0.2, key=bench.key(request=OTHERS[1]))
    bench.arrives(0, 3.0)
    assert revoked(bench.role.tick(0.2 + IDLE_S)) == []


def test_a_grant_that_is_not_used_stays_while_no_other_waits():
    bench = make_bench(num_blocks=4)
    bench.reserve(0.1)
    assert bench.role.tick(30.0) == []


# -- nothing can run for want of blocks


def crowded(*priorities: int) -> Bench:
    """One decodes, two steps from the end of its blocks; grants have all the others."""
    bench = make_bench(num_blocks=4, config=SchedulerConfig(reserved_share=1.0, watermark_blocks_share=0.0))
    run(bench)
    for number, priority in enumerate(priorities):
        bench.reserve(0.3 + number / 10, key=bench.key(request=OTHERS[number]), priority=priority)
    assert bench.pool.num_free == 0
    return bench


@pytest.mark.rule(28)
def test_the_worst_grant_gives_way_to_what_decodes_and_cannot_grow():
    bench = crowded(2, 1)
    step(bench, 0.6)
    step(bench, 0.7)
    actions = bench.done(bench.role.tick(0.8), 0.8)
    assert revoked(actions) == [(OTHERS[0], "growth")], "although it is of a better class than what decodes"
    assert spoken(step(bench, 0.9)) != []


def test_no_grant_gives_way_while_anything_runs():
    bench = crowded(5, 5)
    step(bench, 0.6)
    assert revoked(bench.done(bench.role.tick(0.7), 0.7)) == []


@pytest.mark.rule(28)
def test_what_is_committed_does_not_give_way_to_what_cannot_grow():
    bench = crowded(2, 1)
    for number in (0, 1):
        bench.commit(0.5, key=bench.key(request=OTHERS[number]))
    step(bench, 0.6)
    step(bench, 0.7)
    assert bench.role.context.scheduler.is_starved
    assert revoked(bench.done(bench.role.tick(0.8), 0.8)) == []


# -- what follows


@pytest.mark.rule(28)
def test_a_revoke_that_crosses_the_commit_costs_no_attempt():
    """Rule 34: the decode node never owned it, so this is a refusal."""
    bench = PrefillBench()
    bench.link_up()
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    bench.step(0.3)
    reported = said(bench.hear(DECODES[0], Revoke(key=reserve.key, reason="priority"), 0.4), HandoverFailed)[0]
    assert (reported.reason, reported.commit_sent, reported.retained) == ("revoked", True, True)
    assert bench.hear(DECODES[0], CommitRefused(key=reserve.key, reason="not_reserved"), 0.5) == []
    router = RouterBench()
    router.submit()
    failed(router, 0.2, reason="revoked", commit_sent=True, retained=True)
    assert (request_at(router).state, request_at(router).losses) == (RequestState.WAITING, 0)
