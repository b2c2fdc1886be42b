"""A node with both roles finishes a request where its prompt was computed: one owner at a time, nothing transferred."""

import pytest

from kvferry.common.base.ids import AttemptKey
from kvferry.common.cluster.actions import ExitProcess, OpenLink, RunStep, SendPiece
from kvferry.common.cluster.events import DrainRequested
from kvferry.common.protocol.messages import Cancel, FirstToken, Gone, HandedOver, HandoverFailed, Reserve, Tokens
from kvferry.common.scheduling.sequence import SequenceStatus
from kvferry.decode_node.receive_table import ReceiveState
from kvferry.prefill_node.job import JobState
from tests.support.prefill_bench import DECODES, WORKER, PrefillBench, request, said
from tests.support.role_context import SELF_ID

KEY = AttemptKey(request(1), 1)


def colocated(**options) -> PrefillBench:
    """A node with both roles; one step at a time unless the test says otherwise."""
    return PrefillBench(**{"colocated": True, "steps_in_flight": 1, **options})


def running(**options) -> PrefillBench:
    """Request 1 has its first token and decodes."""
    bench = colocated(**options)
    bench.job(here=True)
    bench.step(0.2)
    return bench


def tokens(actions) -> list[tuple[int, tuple[int, ...], str | None]]:
    """(first index, ids, finish) of what is said to the worker."""
    return [(e.first_index, e.token_ids, e.finish) for message in said(actions, Tokens) for e in message.entries]


def finish(bench: PrefillBench, now: float = 0.3) -> list[tuple[int, tuple[int, ...], str | None]]:
    """Step until nothing is left to step."""
    reported = []
    while bench.steps:
        reported += tokens(bench.step(now))
    return reported


@pytest.mark.rule(4)
def test_a_request_continues_where_its_prompt_was_computed():
    bench = colocated()
    started = bench.job(here=True, candidates=0)
    assert not said(started, Reserve)
    assert [a.plan.report_layers for a in started if isinstance(a, RunStep)] == [False]
    first = bench.step(0.2)
    assert [(m.index, m.token_id) for m in said(first, FirstToken)] == [(0, 50)]
    assert [m.decode for m in said(first, HandedOver)] == [SELF_ID]
    assert tokens(first) == [(0, (50,), None)]
    assert not said(first, Reserve)
    assert not [a for a in first if isinstance(a, SendPiece)]
    assert finish(bench) == [(1, (50,), None), (2, (50,), None), (3, (50,), "length")]
    bench.heartbeat(0.5)
    assert bench.core.is_quiescent()


@pytest.mark.rule(4)
def test_it_is_one_roles_at_a_time():
    bench = colocated()
    bench.job(here=True)
    (seq_id,) = bench.role.jobs.by_seq
    assert (bench.role.owns(seq_id), bench.decode.owns(seq_id)) == (True, False)
    bench.step(0.2)
    assert (bench.role.owns(seq_id), bench.decode.owns(seq_id)) == (False, True)
    assert KEY not in bench.role.jobs.by_attempt
    assert bench.decode.entries.by_attempt[KEY].state is ReceiveState.RUNNING
    assert bench.scheduler.status(seq_id) is SequenceStatus.DECODING


def test_no_candidate_at_all_means_here():
    bench = colocated()
    bench.job(candidates=0)
    assert [m.decode for m in said(bench.step(0.2), HandedOver)] == [SELF_ID]


def test_other_candidates_alone_are_a_hand_over():
    bench = colocated()
    bench.link_up()
    assert [m.key.decode for m in said(bench.job(candidates=1), Reserve)] == [DECODES[0]]


@pytest.mark.rule(6)
def test_a_node_makes_no_link_to_itself_and_none_for_a_job_that_stays():
    bench = colocated()
    assert not [a for a in bench.job(here=True, candidates=2) if isinstance(a, OpenLink)]
    assert bench.role.decodes.links.links == {}


@pytest.mark.rule(18)
def test_what_has_no_room_here_to_its_end_goes_to_another_node():
    """It could be computed here, but not finished."""
    bench = colocated(num_blocks=4)
    bench.link_up()
    reserves = said(bench.job(here=True, candidates=1, prompt=6, max_new_tokens=20), Reserve)
    assert [m.key.decode for m in reserves] == [DECODES[0]]
    assert {*bench.role.decodes.links.links} == {"d0", "d1"}
    bench = colocated(num_blocks=4)
    failed = said(bench.job(here=True, candidates=0, prompt=6, max_new_tokens=20), HandoverFailed)
    assert [(m.reason, m.retryable) for m in failed] == [("invalid", False)]


def test_a_prefill_node_alone_does_not_keep_a_job_that_names_it():
    bench = PrefillBench(steps_in_flight=1)
    failed = said(bench.job(here=True, candidates=0), HandoverFailed)
    assert [m.reason for m in failed] == ["no_room"]


@pytest.mark.rule(18)
def test_jobs_that_stay_need_no_grant():
    """The bound on computed prompts without a grant is for those that must wait for one."""
    bench = colocated(num_blocks=16)
    for number in range(1, 5):
        bench.job(number, placement_no=number, here=True, prompt=9, max_new_tokens=2)
    assert {job.state for job in bench.role.jobs} <= {JobState.QUEUED, JobState.COMPUTING}
    bench.step(0.2)
    assert sum(job.state is JobState.COMPUTING for job in bench.role.jobs) == 3
    assert bench.role.jobs.ungranted_blocks == 0


def test_jobs_that_wait_for_a_grant_do_not_hold_up_those_that_need_none():
    bench = colocated(num_blocks=16, steps_in_flight=4)
    bench.link_up()
    bench.job(1, candidates=1, prompt=11)
    assert bench.role.jobs.ungranted_blocks == 3
    bench.job(2, placement_no=2, candidates=1, prompt=11)
    bench.job(3, placement_no=3, here=True, prompt=11, priority=1)
    states = [bench.role.jobs.by_attempt[AttemptKey(request(number), 1)].state for number in (1, 2, 3)]
    assert states == [JobState.COMPUTING, JobState.QUEUED, JobState.COMPUTING]


def test_a_first_token_that_is_the_last_ends_it_here():
    bench = colocated(eos_token_ids=frozenset({50}))
    bench.job(here=True)
    first = bench.step(0.2)
    assert [m.finish for m in said(first, FirstToken)] == ["stop"]
    assert not said(first, HandedOver)
    assert not bench.decode.entries.by_attempt
    bench.heartbeat(0.3)
    assert bench.core.is_quiescent()


def test_a_copy_of_the_job_changes_nothing_while_it_decodes():
    bench = running()
    assert bench.job(here=True) == []
    assert not bench.role.jobs.by_attempt
    assert finish(bench)[-1] == (3, (50,), "length")


def test_its_state_is_reported_to_the_worker_that_expects_it():
    bench = running()
    assert not said(bench.heartbeat(0.3, (1, 1)), HandedOver)
    assert tokens(bench.heartbeat(0.4, (1, 1), next_index=0, resend=True)) == [(0, (50,), None)]
    finish(bench)
    assert tokens(bench.heartbeat(0.5, (1, 1), next_index=2)) == [(2, (50, 50), "length")]


@pytest.mark.parametrize("end", ["list", "cancel", "silence"])
def test_it_goes_when_its_worker_wants_it_no_more(end):
    bench = running()
    if end == "list":
        bench.heartbeat(0.3)
    elif end == "cancel":
        bench.deliver(WORKER, Cancel(request_id=request(1), attempt=1), 0.3)
    else:
        for quarter in range(1, 16):  # a tick that comes late blames no client
            bench.tick(quarter / 4, worker=quarter < 2)
    bench.step(5.0)
    assert bench.core.is_quiescent()


def test_its_deadline_is_the_jobs():
    bench = colocated()
    bench.job(here=True, remaining_ms=1000)
    bench.step(0.2)
    bench.tick(1.9)
    gone = said(bench.tick(2.2), Gone)
    assert [(m.reason, m.detail) for m in gone] == [("lost", "deadline")]


def test_a_deadline_while_its_prompt_is_computed_leaves_no_sequence_behind():
    """Held KV is for a next hand-over; a sequence that stays would continue by itself."""
    bench = colocated()
    bench.job(here=True, remaining_ms=1000)
    bench.tick(1.9)
    failed = said(bench.tick(2.2), HandoverFailed)
    assert [(m.reason, m.retained) for m in failed] == [("deadline", False)]
    bench.step(2.3)
    bench.heartbeat(2.4)
    assert bench.core.is_quiescent()


def test_a_drain_finishes_it_and_preempts_the_rest():
    bench = running()
    bench.handle(DrainRequested(), 0.3)
    assert finish(bench)[-1] == (3, (50,), "length")
    bench.heartbeat(0.5)
    assert [a.code for a in bench.tick(0.6) if isinstance(a, ExitProcess)] == [0]

    bench = running()
    bench.job(2, placement_no=2, here=True)
    bench.handle(DrainRequested(), 0.3)
    bench.tick(0.4)
    reported = said(bench.tick(0.4 + bench.timers.node_drain_s), Gone)
    assert {(m.request_id, m.reason) for m in reported} == {(request(1), "preempted"), (request(2), "preempted")}


def test_out_of_blocks_the_youngest_is_preempted_and_comes_back_with_its_blocks_to_the_end():
    bench = colocated(num_blocks=6, max_running=4)
    for number in (1, 2):
        bench.job(number, placement_no=number, here=True, prompt=6, max_new_tokens=12, waited_ms=100 - number)
    reported: list[Gone] = []
    while bench.steps and not reported:
        reported = said(bench.step(0.2), Gone)
    assert [(m.request_id, m.reason) for m in reported] == [(request(2), "preempted")]
    bench.job(2, attempt=2, placement_no=3, here=True, prompt=6, max_new_tokens=12, outputs=(50,), times_preempted=3)
    waiting = bench.role.jobs.by_attempt[AttemptKey(request(2), 2)]
    assert waiting.state is JobState.QUEUED
    finish(bench)
    assert AttemptKey(request(2), 2) in bench.decode.entries.by_attempt


def test_a_later_attempt_continues_from_what_is_known():
    bench = colocated()
    bench.job(here=True, attempt=2, outputs=(50, 51), max_new_tokens=4)
    first = bench.step(0.2, token=52)
    assert [(m.index, m.token_id) for m in said(first, FirstToken)] == [(2, 52)]
    assert tokens(bench.step(0.3, token=53)) == [(3, (53,), "length")]


def test_a_later_attempt_inherits_the_blocks_of_an_earlier_one():
    bench = colocated()
    bench.link_up()
    bench.job(candidates=1)
    bench.step(0.2)
    bench.tick(2.0)
    assert bench.role.jobs.by_attempt[KEY].failure is not None
    assert bench.role.jobs.by_attempt[KEY].seq_id is not None
    actions = bench.job(here=True, attempt=2, placement_no=2, outputs=(50,), now=2.1)
    assert [len(part.token_ids) for a in actions if isinstance(a, RunStep) for part in a.plan.scheduled] == [1]
    assert [m.decode for m in said(bench.step(2.2), HandedOver)] == [SELF_ID]


def test_prefix_hits_are_sent_with_the_tokens():
    bench = running()
    finish(bench)
    bench.job(1, 0.4, attempt=2, placement_no=2, here=True)
    first = bench.step(0.5)
    assert [m.cached_tokens for m in said(first, FirstToken)] == [4]
    assert [e.cached_tokens for m in said(first, Tokens) for e in m.entries] == [4]


def test_a_running_stream_gets_its_token_in_every_step_however_long_a_prompt_comes():
    """What a step computes besides it is bounded by max_step_tokens: so is the time between two of its tokens."""
    bench = colocated(max_step_tokens=8, num_blocks=64)
    bench.job(here=True, max_new_tokens=9)
    bench.step(0.2)
    bench.job(2, placement_no=2, here=True, prompt=40, max_new_tokens=2)
    for index in range(2, 7):
        actions = bench.step(0.3)
        (plan,) = [a.plan for a in actions if isinstance(a, RunStep)]
        assert [len(part.token_ids) for part in plan.scheduled] == [1, 7]
        assert (index - 1, (50,), None) in tokens(actions)
