"""The prefill role and its node: what waits, what is not for it, both roles in one process, stuck engines, damage."""

from array import array

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.actions import ExitProcess, SendPiece, StopPieces
from kvferry.common.cluster.events import (
    DrainRequested,
    EngineFailed,
    KvSendFailed,
    LayersDone,
    LinkClosed,
    LinkConnected,
    PieceArrived,
    PieceSent,
    ProbeAnswered,
    StepDone,
    StepProgressed,
    Tick,
)
from kvferry.common.cluster.node_core import NodeCore
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import (
    Abort,
    Cancel,
    Commit,
    CommitRefused,
    Committed,
    FirstToken,
    Gone,
    Granted,
    HandoverFailed,
    Heartbeat,
    Hello,
    Piece,
    Queued,
    Refused,
    Reserve,
    Revoke,
    Status,
    WantedRequest,
)
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.step import StepResult
from kvferry.decode_node.role import DecodeRole
from kvferry.prefill_node.handover_table import SendState
from kvferry.prefill_node.job import JobState
from tests.support.prefill_bench import DECODES, WORKER, PrefillBench, request, said
from tests.support.role_context import COMPATIBILITY, LAYERS, SELF_ID
from tests.unit.prefill_node.test_handover_send import TOKEN, grant, make_sender, messages

PEER = Incarnation("7" * 32)


@pytest.fixture
def bench():
    bench = PrefillBench()
    bench.link_up()
    return bench


def only_job(bench: PrefillBench):
    (job,) = bench.role.jobs
    return job


def sender_of(bench: PrefillBench):
    sender = only_job(bench).sender
    assert sender is not None
    return sender


def granted(bench: PrefillBench) -> TransferKey:
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    return reserve.key


def exits(actions):
    return [action.code for action in actions if isinstance(action, ExitProcess)]


# -- what waits


@pytest.mark.rule(17)
def test_the_better_class_and_then_the_older_request_starts_first():
    """Rule 17: class and age both come with the Job, so a retry keeps its place."""
    bench = PrefillBench(Limits(unreserved_prompt_share=1.0), max_running=1, steps_in_flight=1)
    bench.link_up()
    bench.job(1)
    bench.job(2, priority=3)
    bench.job(3, priority=3, waited_ms=5_000)
    bench.job(4, priority=1)
    bench.job(5, priority=5, waited_ms=60_000)
    order = []
    while bench.steps:
        order += [message.key.request_id for message in said(bench.step(0.3), Reserve)]
    assert order == [request(number) for number in (5, 4, 3, 2)]


def test_a_job_whose_time_is_over_while_it_waits_holds_nothing():
    bench = PrefillBench(max_running=1)
    bench.link_up()
    bench.job(1)
    bench.job(2, remaining_ms=500)
    held = bench.pool.num_held
    (failed,) = said(bench.tick(1.7), HandoverFailed)
    assert (failed.request_id, failed.reason, failed.retained) == (request(2), "deadline", False)
    assert bench.scheduler.num_waiting == 0
    assert bench.pool.num_held == held


def test_the_engine_may_finish_what_has_failed_meanwhile(bench):
    """The token is sampled, no worker is notified, and the KV stays retained."""
    bench.job(candidates=0)
    assert only_job(bench).state is JobState.FAILED
    assert said(bench.step(0.2), FirstToken) == []
    assert only_job(bench).state is JobState.FAILED


def test_the_engine_may_end_what_has_failed_meanwhile(bench):
    bench.job(candidates=0)
    assert bench.step(0.2, failed="not a number") != []
    assert bench.pool.num_held == 0


def test_the_first_token_may_be_the_last_although_more_were_allowed():
    """An eos: the reservation is released, nothing is handed over."""
    bench = PrefillBench(eos_token_ids=frozenset({50}))
    bench.link_up()
    key = granted(bench)
    actions = bench.step(0.3)
    assert said(actions, FirstToken)[0].finish == "stop"
    assert said(actions, Abort) == [Abort(key=key)]
    assert said(actions, Commit) == []


def test_layers_of_what_is_over_are_not_sent(bench):
    granted(bench)
    plan = bench.steps[0]
    bench.deliver(WORKER, Cancel(request_id=request(1), attempt=1), 0.3)
    assert bench.handle(LayersDone(plan.step_id, LAYERS), 0.4) == []
    assert bench.handle(LayersDone(99, LAYERS), 0.4) == []


# -- what changes nothing


def test_answers_that_come_late_or_twice_change_nothing(bench):
    key = granted(bench)
    assert bench.grant(reserve_of(key), 0.3) == []  # granted already
    assert bench.hear(DECODES[0], Queued(key=key), 0.3) == []
    stale = key._replace(generation=0)
    assert bench.hear(DECODES[0], Queued(key=stale), 0.3) == []
    assert bench.hear(DECODES[0], Refused(key=stale, reason="full"), 0.3) == []
    assert bench.hear(DECODES[0], Committed(key=stale), 0.3) == []
    assert bench.hear(DECODES[0], Committed(key=key), 0.3) == []  # no Commit was sent
    assert sender_of(bench).state is SendState.GRANTED


def reserve_of(key: TransferKey) -> Reserve:
    return Reserve(
        key=key,
        transfer_no=1,
        placement_no=1,
        worker=WORKER,
        spec=RequestSpec(
            model="m",
            prompt_token_ids=array("I", [1, 2]),
            output_token_ids=array("I"),
            sampling=SamplingParams(max_new_tokens=4),
            priority=3,
        ),
        remaining_ms=0,
        waited_ms=0,
    )


def test_nothing_moves_what_was_committed(bench):
    """Rule 25: owned by decode; a revocation that crossed it is answered, and changes nothing."""
    key = granted(bench)
    bench.step(0.3)
    bench.committed(key, 0.4, complete=False)
    assert said(bench.hear(DECODES[0], Revoke(key=key, reason="time"), 0.5), Abort)
    assert bench.hear(DECODES[0], CommitRefused(key=key, reason="not_reserved"), 0.5) == []
    assert bench.handle(KvSendFailed(key, "closed"), 0.5) == [StopPieces(key)]
    assert sender_of(bench).state is SendState.COMMITTED
    assert only_job(bench).state is JobState.HANDED


def test_events_and_messages_of_others_change_nothing(bench):
    granted(bench)
    before = sender_of(bench).state
    assert bench.handle(PieceSent(TransferKey(request(9), 1, 1, SELF_ID, DECODES[0]), 0), 0.3) == []
    assert bench.handle(PieceSent(TransferKey(request(1), 1, 9, SELF_ID, DECODES[0]), 0), 0.3) == []
    assert bench.role.on_event(DrainRequested(), 0.3) == []
    assert bench.role.on_message(bench.core.clients.clients[WORKER], Status(status_no=1), 0.3) == []
    assert bench.hear(DECODES[0], Hello(kind="worker", name="x"), 0.3) == []
    assert sender_of(bench).state is before


def test_messages_that_no_role_is_for_change_nothing(bench):
    assert (
        bench.deliver(WORKER, Granted(key=TransferKey(request(1), 1, 1, SELF_ID, DECODES[0]), first_token=0), 0.2) == []
    )


def test_an_older_list_changes_nothing(bench):
    bench.job()
    entry = WantedRequest(request_id=request(1), attempt=1, next_index=0, expected=True)
    bench.deliver(WORKER, Heartbeat(heartbeat_no=5, as_of=1, wanted=(entry,)), 0.2)
    assert bench.deliver(WORKER, Heartbeat(heartbeat_no=4, as_of=1), 0.3) == []
    assert bench.role.knows(request(1), 1)


@pytest.mark.rule(15)
def test_a_worker_that_exits_in_order_leaves_nothing_immediately(bench):
    """Rule 15."""
    bench.job()
    bench.step(0.2)
    bench.deliver(WORKER, Heartbeat(heartbeat_no=9, as_of=9, last=True), 0.3)
    assert bench.role.is_quiescent()
    assert bench.pool.num_held == 0
    assert WORKER not in bench.core.clients.clients


# -- both roles in one process


def test_a_node_of_both_roles_keeps_them_apart():
    bench = PrefillBench()
    decode = DecodeRole(bench.role.context)
    bench.core = NodeCore(
        bench.core.identity, bench.timers, bench.scheduler, [bench.role, decode], bench.role.context.clients
    )
    assert bench.core.role_names == ("prefill", "decode")
    bench.deliver(WORKER, Hello(kind="worker", name="w"), 0.0)
    bench.deliver(PEER, Hello(kind="prefill", name="p2", compatibility=COMPATIBILITY), 0.0)
    bench.heartbeat(0.1, as_of=0)
    bench.job(1, candidates=1)
    bench.deliver(PEER, reserve_of(TransferKey(request(2), 1, 1, PEER, SELF_ID)), 0.2)
    assert bench.role.knows(request(1), 1)
    assert decode.knows(request(2), 1)
    assert not bench.role.knows(request(2), 1)
    bench.step(0.3)
    assert only_job(bench).state is JobState.COMPUTED
    reported = said(bench.heartbeat(0.4, (1, 1), (2, 1), (3, 1), as_of=1), Gone)
    assert [(gone.request_id, gone.reason) for gone in reported] == [(request(3), "never_known")]
    assert bench.handle(PieceArrived(piece_of(request(3))), 0.5) == []
    bench.deliver(WORKER, Cancel(request_id=request(1), attempt=1), 0.6)
    bench.deliver(WORKER, Cancel(request_id=request(2), attempt=1), 0.6)
    assert bench.core.is_quiescent()


def piece_of(request_id):
    key = TransferKey(request_id, 1, 1, PEER, SELF_ID)
    return Piece(key=key, number=0, layer_start=0, layer_end=1, token_start=0, token_end=1, num_bytes=1)


# -- an engine that makes no progress


def test_a_failed_engine_ends_the_process_and_nothing_is_given_to_it_any_more(bench):
    assert exits(bench.handle(EngineFailed("out of memory"), 0.1)) == [1]
    bench.job()
    assert bench.steps == []


@pytest.mark.rule(10)
def test_an_engine_without_a_step_although_work_waits_ends_the_process(bench):
    """Rule 10."""
    bench.job()
    ends: list[int] = []
    now = 0.1
    while not ends and now < 60:
        now += 0.2
        ends = exits(bench.tick(now))
    assert ends == [1]
    assert now == pytest.approx(bench.timers.engine_stall_exit_s, abs=0.7)


@pytest.mark.rule(10)
@pytest.mark.parametrize("sign", [StepProgressed(), LayersDone(0, 1)])
def test_a_step_of_any_length_that_comes_further_ends_nothing_and_is_reported(bench, sign):
    """Rule 10, ADR 0027: who is slow is not stuck."""
    bench.job()
    now, said_to_be_at = 0.1, set[int]()
    while now < 4 * bench.timers.engine_stall_exit_s:
        now += 0.4
        actions = bench.tick(now)
        assert exits(actions) == []
        said_to_be_at |= {status.progress_no for status in said(actions, Status)}
        if int(now) % 5 == 0:
            bench.handle(sign, now)
    assert len(said_to_be_at) > 20
    assert {status.steps_done for status in said(actions, Status)} <= {0}


def test_status_has_the_age_of_the_step_in_progress(bench):
    bench.job(now=1.0)
    bench.tick(1.1)
    (status,) = said(bench.tick(1.7), Status)
    assert (status.step_age_ms, status.work_waiting, status.steps_done) == (700, True, 0)
    bench.step(1.8)
    (status,) = said(bench.tick(2.3), Status)
    assert (status.step_age_ms, status.work_waiting, status.steps_done) == (0, False, 1)


def test_who_slept_does_not_blame_its_engine(bench):
    bench.job()
    bench.tick(0.2)
    assert exits(bench.handle(Tick(), 100.0)) == []


@pytest.mark.rule(37)
def test_a_drain_ends_in_time_even_if_workers_keep_their_lists(bench):
    """Rule 37."""
    bench.job()
    bench.step(0.2)
    bench.tick(0.3)
    bench.handle(DrainRequested(), 0.3)
    assert bench.handle(DrainRequested(), 1.0) == []  # said again
    drained = 0.3 + bench.timers.node_drain_s
    ends = [exits(bench.tick(drained + seconds)) for seconds in (0.1, 4.9, 5.1, 5.2)]
    assert ends == [[], [], [0], []]


# -- damage


def test_a_step_that_was_not_given_is_a_bug_that_is_reported(bench):
    granted(bench)
    with pytest.raises(InvariantError, match="oldest in flight"):
        bench.core.handle(StepDone(StepResult(99)), 0.5)


def damage_sequence(bench):
    only_job(bench).seq_id = None


def damage_pin(bench):
    only_job(bench).pinned = True


def damage_delisted(bench):
    only_job(bench).delisted = True


def damage_filed(bench):
    jobs = bench.role.jobs
    jobs.by_attempt = {key._replace(attempt=9): job for key, job in jobs.by_attempt.items()}


def damage_seq_index(bench):
    bench.role.jobs.by_seq.clear()


def damage_seq_of_no_job(bench):
    bench.role.jobs.by_attempt.clear()


def damage_commit_sent(bench):
    sender_of(bench).commit_sent = True


def damage_key(bench):
    sender_of(bench).key = None


def damage_numbers(bench):
    bench.step(0.4)
    pieces = sender_of(bench)._stream._plan._pieces
    pieces.reverse()
    pieces.append(pieces[0])


@pytest.mark.parametrize(
    "damage",
    [
        damage_sequence,
        damage_pin,
        damage_delisted,
        damage_filed,
        damage_seq_index,
        damage_seq_of_no_job,
        damage_commit_sent,
        damage_key,
        damage_numbers,
    ],
)
def test_damage_is_seen(bench, damage):
    granted(bench)
    bench.core.check_invariants()
    damage(bench)
    with pytest.raises(InvariantError):
        bench.core.check_invariants()


def test_more_steps_than_were_given_are_seen(bench):
    bench.core._steps_in_flight = -1
    with pytest.raises(InvariantError, match="more steps"):
        bench.core.check_invariants()


def test_links_of_the_role_take_any_event(bench):
    assert [type(action).__name__ for action in bench.handle(LinkConnected("d0"), 0.4)] == ["SendHello"]


# -- after the hand-over, and meanwhile


def test_the_owners_death_after_the_hand_over_ends_the_reading_and_nothing_is_asked_for_again(bench):
    """Rule 4: the worker plans a new attempt; this one has had its target."""
    key = granted(bench)
    bench.step(0.3)
    bench.committed(key, 0.4, complete=False)
    bench.handle(LinkClosed("d0"), 0.5)
    actions = bench.handle(ProbeAnswered("d0", "refused"), 0.5)
    assert StopPieces(key) in actions
    assert said(actions, Reserve) == []
    assert said(actions, HandoverFailed) == []
    bench.stopped(actions, 0.6)
    assert bench.pool.num_held == 0


def test_a_chunk_that_the_decode_node_has_is_passed_over():
    """Rule 23: from the position asked for on, to the token."""
    sender = make_sender()
    sender.ask(0.0)
    sender.progress(0, 4, 2, 0.1)
    sender.progress(4, 6, 2, 0.1)
    assert sender.key is not None
    grant(sender, 4, 0.2)
    given = [action.piece for action in sender.give_slot(0.2) if isinstance(action, SendPiece)]
    assert {(piece.token_start, piece.token_end) for piece in given} == {(4, 6)}
    assert len(messages(sender.token_known(TOKEN, 0.3), Commit)) == 1


def test_when_the_decode_node_has_everything_the_commit_goes_alone():
    sender = make_sender()
    sender.ask(0.0)
    sender.progress(0, 6, 2, 0.1)
    assert sender.key is not None
    grant(sender, 6, 0.2)
    assert sender.give_slot(0.2) == []
    (commit,) = messages(sender.token_known(TOKEN, 0.3), Commit)
    assert (commit.num_pieces, commit.first_token_pos, commit.num_tokens) == (0, 6, 6)


def test_an_eos_sampled_for_what_has_failed_meanwhile_is_not_sent():
    """The worker has planned again, and its next attempt samples the same token."""
    bench = PrefillBench(eos_token_ids=frozenset({50}))
    bench.job(candidates=0)
    assert said(bench.step(0.2), FirstToken) == []
    assert only_job(bench).state is JobState.FAILED
    assert bench.pool.num_held == 0
