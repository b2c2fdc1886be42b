"""A node that plans its next step while one is computed: reports, the age of a step, a stuck engine."""

from kvferry.common.cluster.actions import Action, ExitProcess, RunStep
from kvferry.common.protocol.messages import Tokens
from tests.support.prefill_bench import PrefillBench, said


def running(**options) -> PrefillBench:
    """Request 1 decodes, and a step of it is in flight with one ahead of it."""
    bench = PrefillBench(colocated=True, steps_in_flight=2, **options)
    bench.job(here=True, max_new_tokens=20)
    bench.step(0.2)
    return bench


def ahead(bench: PrefillBench) -> list[list[bool]]:
    return [[part.is_placeholder for part in plan.scheduled] for plan in bench.steps]


def test_two_steps_are_given_and_one_more_with_each_that_is_done():
    bench = running()
    assert ahead(bench) == [[False], [True]]
    given = [action.plan for action in bench.step(0.3) if isinstance(action, RunStep)]
    assert [[part.is_placeholder for part in plan.scheduled] for plan in given] == [[True]]
    assert ahead(bench) == [[True], [True]]


def test_nothing_is_sent_of_what_was_computed_behind_the_end():
    bench = running(eos_token_ids=frozenset({7}))
    reported = [e.finish for message in said(bench.step(0.3, token=7), Tokens) for e in message.entries]
    assert reported == ["stop"]
    assert len(bench.steps) == 1
    assert not said(bench.step(0.4, token=8), Tokens)
    bench.heartbeat(0.5)
    assert bench.core.is_quiescent()


def test_a_request_that_failed_is_reported_once():
    bench = running()
    assert [e.error for m in said(bench.step(0.3, failed="not a number"), Tokens) for e in m.entries] == [
        "not a number"
    ]
    assert not said(bench.step(0.4, failed="not a number"), Tokens)
    bench.heartbeat(0.5)
    assert bench.core.is_quiescent()


def test_the_step_ahead_begins_when_the_one_before_is_done():
    bench = running()
    assert bench.core.progress.started_at == 0.2
    bench.step(0.3)
    assert bench.core.progress.started_at == 0.3


def test_an_engine_with_two_steps_that_does_none_is_stuck():
    bench = running()
    stall = bench.timers.engine_stall_exit_s
    now, actions = 0.2, list[Action]()
    while now < stall + 1.0 and not any(isinstance(action, ExitProcess) for action in actions):
        actions = bench.tick(now := now + bench.timers.late_tick_s / 2)
    assert stall < now < stall + 1.0
