"""A prompt that others go before keeps its blocks and gives its reservation back meanwhile: rule 20."""

import pytest

from kvferry.common.cluster.events import LayersDone
from kvferry.common.protocol.messages import Abort, Commit, HandoverFailed, Reserve
from kvferry.prefill_node.transfer import ReservationPauses
from tests.support.prefill_bench import DECODES, PrefillBench, request, said

LONG, WORSE, BETTER = 100, 1, 2


@pytest.fixture
def bench():
    """A long prompt of a worse class is under way, its room granted; then a better class takes whole steps."""
    bench = PrefillBench(num_blocks=160, steps_in_flight=1)
    bench.link_up()
    bench.grant(said(bench.job(WORSE, prompt=LONG, priority=5), Reserve)[0], 0.1)
    bench.job(BETTER, now=0.2, prompt=120, priority=1)
    bench.grant(said(bench.step(0.3), Reserve)[0], 0.3)
    return bench


def key_of(bench: PrefillBench, number: int = WORSE):
    sender = next(job.sender for job in bench.role.jobs if job.message.request_id == request(number))
    assert sender is not None
    return sender.key


def ticks(bench: PrefillBench, start: float, end: float):
    return [action for tenth in range(round(start * 10), round(end * 10)) for action in bench.tick(tenth / 10)]


@pytest.mark.rule(20)
def test_a_long_pause_gives_the_reservation_back_and_keeps_the_blocks(bench):
    held, granted = bench.pool.num_held, key_of(bench)
    assert said(ticks(bench, 0.4, 2.4), Abort) == []
    assert said(ticks(bench, 2.4, 4.0), Abort) == [Abort(key=granted)]
    assert key_of(bench) is None
    assert bench.pool.num_held == held


@pytest.mark.rule(20)
def test_when_it_continues_the_same_node_is_asked_again_and_nothing_is_computed_again(bench):
    granted = key_of(bench)
    bench.stopped(ticks(bench, 0.4, 4.0), 4.0)
    bench.step(4.0)
    assert [len(part.token_ids) for part in bench.steps[0].scheduled] == [56, 8]
    reserve = said(bench.step(4.1), Reserve)[0]
    assert (reserve.key.decode, reserve.key.generation) == (DECODES[0], granted.generation + 1)
    bench.pieces.clear()
    bench.grant(reserve, 4.2)
    commit = said(bench.step(4.3), Commit)[0]
    assert commit.key == reserve.key
    sent = sum(a.piece.token_end - a.piece.token_start for a in bench.pieces if a.piece.key == reserve.key)
    assert sent == LONG


@pytest.mark.rule(20)
def test_after_a_second_pause_room_is_asked_for_with_the_last_chunk_alone(bench):
    """Each time that room is asked for again all its KV goes again."""
    job = next(job for job in bench.role.jobs if job.message.request_id == request(WORSE))
    assert job.sender is not None
    pauses = ReservationPauses(bench.scheduler, paused_reservation_s=0.0)
    for pause in (1, 2):
        job.paused_since = pause
        assert said(pauses.tick(job, pause + 0.5), Abort)
        assert bool(said(pauses.resume(job, 60, pause + 0.6), Reserve)) == (pause == 1)
    assert said(pauses.resume(job, LONG, 3.0), Reserve)


def test_room_is_asked_for_while_its_chunk_is_computed(bench):
    """The transfer stays hidden behind the computing."""
    ticks(bench, 0.4, 4.0)
    bench.step(4.0)
    plan = bench.steps[0]
    assert plan.report_layers
    assert said(bench.handle(LayersDone(plan.step_id, 1), 4.1), Reserve)


@pytest.mark.rule(20)
def test_a_step_that_takes_long_is_no_pause():
    bench = PrefillBench(num_blocks=160, steps_in_flight=1)
    bench.link_up()
    bench.grant(said(bench.job(WORSE, prompt=LONG), Reserve)[0], 0.1)
    assert said(ticks(bench, 0.2, 9.0), Abort) == []


def test_a_paused_prompt_is_bounded_by_its_deadline_and_its_worker(bench):
    actions = ticks(bench, 0.4, 4.0)
    actions += bench.tick(61.3)
    failed = said(actions, HandoverFailed)
    assert (request(WORSE), "deadline") in [(message.request_id, message.reason) for message in failed]
    bench.stopped(actions, 61.4)
    bench.heartbeat(61.4)
    assert bench.role.is_quiescent()
