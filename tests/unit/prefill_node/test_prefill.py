"""The prefill role: what it takes, how far it goes without a grant, when it releases blocks, what it reports again."""

import pytest
from msgspec.structs import replace

from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.actions import CloseKv, OpenKv, Send, SendHello, SendPiece, StopPieces
from kvferry.common.cluster.events import (
    DrainRequested,
    KvSendFailed,
    LayersDone,
    LinkClosed,
    LinkConnected,
    ProbeAnswered,
)
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import (
    Abort,
    Cancel,
    Commit,
    CommitRefused,
    FirstToken,
    Gone,
    Granted,
    HandedOver,
    HandoverFailed,
    Heartbeat,
    HelloRefused,
    Message,
    Queued,
    Refused,
    Reserve,
    Revoke,
    WrongIncarnation,
)
from kvferry.prefill_node.handover_table import SendState
from kvferry.prefill_node.job import JobState
from tests.support.prefill_bench import DECODES, WORKER, PrefillBench, request, said
from tests.support.role_context import COMPATIBILITY


@pytest.fixture
def bench():
    bench = PrefillBench()
    bench.link_up()
    return bench


def job_of(bench: PrefillBench, number: int = 1):
    return next(job for job in bench.role.jobs if job.message.request_id == request(number))


# -- what it takes


def test_a_request_from_job_to_hand_over(bench):
    reserve = said(bench.job(), Reserve)[0]
    assert bench.grant(reserve, 0.2) == []
    first = bench.step(0.3)
    assert said(first, FirstToken)[0].token_id == 50
    assert said(first, Commit)[0].key == reserve.key
    assert said(bench.committed(reserve.key, 0.4), HandedOver)[0].decode == DECODES[0]
    bench.sent(0.5)
    assert bench.pool.num_held == 0
    assert job_of(bench).state is JobState.HANDED
    bench.heartbeat(0.6)
    assert bench.role.is_quiescent()


@pytest.mark.rule(13)
def test_a_late_job_that_the_list_no_longer_has_is_refused(bench):
    """Rule 13."""
    bench.heartbeat(0.1, as_of=7)
    assert [gone.reason for gone in said(bench.job(now=0.2, placement_no=7), Gone)] == ["lost"]
    assert bench.role.is_quiescent()
    assert said(bench.job(now=0.3, placement_no=8), Reserve)


def test_a_job_that_comes_twice_is_one_job(bench):
    bench.job()
    assert bench.job(now=0.2) == []
    assert bench.pool.num_held == 2


def test_a_job_that_could_never_run_here_ends_the_request(bench):
    failed = said(bench.job(prompt=200), HandoverFailed)[0]
    assert (failed.reason, failed.retryable) == ("invalid", False)
    assert bench.role.is_quiescent()


@pytest.mark.rule(35)
def test_new_requests_are_bounded_and_later_attempts_are_not():
    """Rule 35."""
    bench = PrefillBench(Limits(queued_requests=1), max_running=1)
    bench.link_up()
    bench.job(1)
    bench.job(2)
    assert said(bench.job(3), HandoverFailed)[0].reason == "overloaded"
    assert said(bench.job(3, attempt=2), HandoverFailed) == []
    assert bench.scheduler.num_waiting == 2


def test_waiting_tokens_are_bounded_but_one_long_prompt_is_taken():
    bench = PrefillBench(Limits(queued_tokens=10), max_running=1)
    bench.link_up()
    assert said(bench.job(1, prompt=20), HandoverFailed) == []
    assert said(bench.job(2, prompt=6), HandoverFailed)[0].reason == "overloaded"


def test_a_draining_node_takes_nothing_new_and_continues_with_its_jobs(bench):
    """Rule 37."""
    reserve = said(bench.job(), Reserve)[0]
    bench.handle(DrainRequested(), 0.2)
    assert said(bench.job(2, now=0.3), HandoverFailed)[0].reason == "draining"
    bench.grant(reserve, 0.4)
    assert said(bench.step(0.5), Commit)


def test_what_the_drain_does_not_finish_is_preempted(bench):
    bench.job()
    bench.step(0.2)
    bench.handle(DrainRequested(), 0.3)
    actions = bench.tick(0.3 + bench.timers.node_drain_s + 0.1)
    assert [(gone.attempt, gone.reason) for gone in said(actions, Gone)] == [(1, "preempted")]
    assert bench.pool.num_held == 0
    reported = bench.heartbeat(61.0, (1, 1))
    assert [gone.reason for gone in said(reported, Gone)] == ["preempted"]  # until the wanted set drops it


# -- how far it goes without a grant


@pytest.mark.rule(18)
def test_computed_prompts_without_a_grant_are_bounded():
    """Rule 18: a full decode side backs up into the queue."""
    bench = PrefillBench(Limits(unreserved_prompt_share=0.125))
    bench.link_up()
    reserves = [reserve for number in (1, 2, 3) for reserve in said(bench.job(number), Reserve)]
    assert [reserve.key.request_id for reserve in reserves] == [request(1), request(2)]
    assert bench.scheduler.num_waiting == 1
    assert [r.key.request_id for r in said(bench.grant(reserves[0], 0.2), Reserve)] == [request(3)]


def test_one_job_may_always_run_and_one_token_needs_no_grant():
    bench = PrefillBench(Limits(unreserved_prompt_share=0.01))
    bench.link_up()
    assert said(bench.job(1), Reserve)
    assert said(bench.job(2, max_new_tokens=1), Reserve) == []
    assert bench.scheduler.num_waiting == 0


@pytest.mark.rule(18)
def test_a_request_for_one_token_reserves_nothing(bench):
    """Rule 18."""
    assert said(bench.job(max_new_tokens=1), Reserve) == []
    token = said(bench.step(0.2), FirstToken)[0]
    assert (token.token_id, token.finish) == (50, "length")
    assert bench.pool.num_held == 0


@pytest.mark.rule(20)
def test_room_is_asked_for_at_the_start_and_pieces_go_layer_by_layer():
    """Rules 18 and 20: the transfer is hidden behind the computing."""
    bench = PrefillBench(Limits(piece_target_bytes=6 * 1024))
    bench.link_up()
    reserve = said(bench.job(), Reserve)[0]
    assert len(bench.steps) == 1
    bench.grant(reserve, 0.2)
    plan = bench.steps[0]
    assert plan.report_layers
    first = bench.handle(LayersDone(plan.step_id, 1), 0.3)
    assert [a.piece.layer_start for a in first if isinstance(a, SendPiece)] == [0]
    second = bench.handle(LayersDone(plan.step_id, 2), 0.4)
    assert [a.piece.layer_start for a in second if isinstance(a, SendPiece)] == [1]
    assert bench.handle(LayersDone(plan.step_id, 2), 0.5) == []  # reported again


def test_transfers_under_way_to_one_node_are_bounded():
    bench = PrefillBench(Limits(transfers_per_peer=1, transfers_per_node=2))
    bench.link_up()
    for number in (1, 2):
        bench.grant(said(bench.job(number), Reserve)[0], 0.1)
    bench.step(0.2)
    bench.step(0.2)
    assert {action.piece.key.request_id for action in bench.pieces} == {request(1)}
    bench.sent(0.3)
    assert {action.piece.key.request_id for action in bench.pieces} == {request(2)}


def test_transfers_under_way_of_one_node_are_bounded():
    bench = PrefillBench(Limits(transfers_per_peer=4, transfers_per_node=1))
    bench.link_up()
    for number in (1, 2):
        bench.grant(said(bench.job(number), Reserve)[0], 0.1)
    bench.step(0.2)
    bench.step(0.2)
    assert len({action.piece.key for action in bench.pieces}) == 1


# -- the hand-over


@pytest.mark.rule(20)
def test_a_candidate_that_refuses_costs_no_recompute():
    """Rules 20 and 27: the next one gets everything again, what the first one got as well."""
    bench = PrefillBench(Limits(piece_target_bytes=6 * 1024))
    bench.link_up()
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    bench.handle(LayersDone(bench.steps[0].step_id, 1), 0.2)
    assert [action.piece.key for action in bench.pieces] == [reserve.key]
    again = said(bench.hear(DECODES[0], Refused(key=reserve.key, reason="full"), 0.3), Reserve)[0]
    assert (again.key.decode, again.key.generation) == (DECODES[1], 2)
    bench.step(0.3)
    (commit,) = said(bench.grant(again, 0.4), Commit)
    given = [action.piece for action in bench.pieces if action.piece.key == again.key]
    assert [(piece.number, piece.layer_start) for piece in given] == [(0, 0), (1, 1)]
    assert (commit.num_tokens, commit.num_pieces) == (6, 2)
    assert bench.steps == []


@pytest.mark.rule(27)
def test_a_candidate_that_has_no_room_yet_is_waited_for_a_while(bench):
    reserve = said(bench.job(), Reserve)[0]
    bench.step(0.2)
    bench.hear(DECODES[0], Queued(key=reserve.key), 0.3)
    assert {r.key.decode for r in said(bench.tick(4.0), Reserve)} <= {DECODES[0]}
    assert said(bench.tick(5.2), Reserve)[0].key.decode == DECODES[1]


@pytest.mark.rule(19)
def test_none_left_is_no_room_and_the_kv_is_held_for_the_next_attempt(bench):
    """Rules 19, 22 and 27: the next attempt computes nothing."""
    for _ in range(2):
        bench.job()
    bench.step(0.2)
    for decode in DECODES:
        key = job_of(bench).sender.key
        actions = bench.hear(decode, Refused(key=key, reason="full"), 0.3)
    failed = said(actions, HandoverFailed)[0]
    assert (failed.reason, failed.retained, failed.commit_sent) == ("no_room", True, False)
    assert bench.pool.num_held == 2
    assert said(bench.heartbeat(0.5, (1, 1)), HandoverFailed) == [failed]
    reserve = said(bench.job(now=0.6, attempt=2, placement_no=2, outputs=(50,)), Reserve)[0]
    assert bench.steps == []
    assert said(bench.grant(reserve, 0.7), Commit)[0].token_id == 50
    assert len(bench.role.jobs.by_attempt) == 1


@pytest.mark.rule(22)
def test_retained_kv_is_released_in_time_and_the_entry_stays(bench):
    """Rule 22."""
    bench.job(candidates=0)
    assert bench.pool.num_held == 2
    bench.step(0.2)
    bench.tick(9.0)
    assert bench.pool.num_held == 2
    bench.tick(10.2)
    assert bench.pool.num_held == 0
    assert job_of(bench).state is JobState.FAILED
    bench.heartbeat(10.3, as_of=1)
    assert bench.role.is_quiescent()


@pytest.mark.rule(22)
def test_held_kv_is_bounded_by_a_share_of_the_pool():
    """Rule 22."""
    bench = PrefillBench(Limits(retained_share=0.0625, unreserved_prompt_share=1.0))
    bench.link_up()
    failures = [said(bench.job(number, candidates=0), HandoverFailed)[0] for number in (1, 2)]
    assert [failure.retained for failure in failures] == [True, False]


def test_a_failed_commit_says_so_and_with_whom(bench):
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    bench.step(0.3)
    failed = said(bench.hear(DECODES[0], CommitRefused(key=reserve.key, reason="not_reserved"), 0.4), HandoverFailed)[0]
    assert (failed.reason, failed.commit_sent, failed.decode) == ("not_reserved", True, DECODES[0])


@pytest.mark.rule(28)
def test_a_revoked_grant_is_released_and_the_next_one_asked(bench):
    """Rule 28."""
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    actions = bench.hear(DECODES[0], Revoke(key=reserve.key, reason="draining"), 0.3)
    assert said(actions, Abort) == [Abort(key=reserve.key)]
    assert said(actions, Reserve)[0].key.decode == DECODES[1]


@pytest.mark.parametrize("kind", [Granted, Revoke])
def test_a_grant_that_no_job_waits_for_is_released(bench, kind: type[Message]):
    reserve = said(bench.job(), Reserve)[0]
    bench.deliver(WORKER, Cancel(request_id=request(1), attempt=1), 0.2)
    late = Granted(key=reserve.key, first_token=0) if kind is Granted else Revoke(key=reserve.key, reason="time")
    assert said(bench.hear(DECODES[0], late, 0.3), Abort) == [Abort(key=reserve.key)]
    assert bench.hear(DECODES[0], Queued(key=reserve.key), 0.4) == []


@pytest.mark.rule(2)
def test_a_grant_of_an_earlier_generation_is_released(bench):
    """Rule 2: the key has the generation."""
    first = said(bench.job(), Reserve)[0]
    bench.hear(DECODES[0], Refused(key=first.key, reason="full"), 0.2)
    assert said(bench.grant(first, 0.3), Abort) == [Abort(key=first.key)]
    assert job_of(bench).sender.key.decode == DECODES[1]


@pytest.mark.rule(2)
@pytest.mark.parametrize("kind", [Granted, Refused])
def test_a_decode_node_does_not_answer_for_another(bench, kind: type[Message]):
    """Rule 2: the key names who may answer."""
    key = said(bench.job(), Reserve)[0].key
    said_by_other = Granted(key=key, first_token=0) if kind is Granted else Refused(key=key, reason="full")
    bench.hear(DECODES[1], said_by_other, 0.2)
    assert job_of(bench).sender.state is SendState.ASKING
    assert job_of(bench).sender.key == key


def test_a_decode_node_that_dies_before_the_commit_costs_no_attempt(bench):
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    bench.handle(LinkClosed("d0"), 0.3)
    actions = bench.handle(ProbeAnswered("d0", "refused"), 0.4)
    assert CloseKv(DECODES[0]) in actions
    assert said(actions, Reserve)[0].key.decode == DECODES[1]
    assert said(actions, HandoverFailed) == []


@pytest.mark.rule(4)
def test_a_decode_node_that_dies_after_the_commit_ends_the_attempts_hand_over(bench):
    """Rule 4."""
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    bench.step(0.3)
    bench.handle(LinkClosed("d0"), 0.3)
    actions = bench.handle(ProbeAnswered("d0", "refused"), 0.4)
    failed = said(actions, HandoverFailed)[0]
    assert (failed.reason, failed.commit_sent) == ("lost", True)
    assert said(actions, Reserve) == []


def test_a_transport_that_fails_before_the_commit_is_like_a_refusal_and_after_it_a_loss(bench):
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    second = said(bench.handle(KvSendFailed(reserve.key, "closed"), 0.3), Reserve)[0]
    assert second.key.decode == DECODES[1]
    assert bench.handle(KvSendFailed(reserve.key, "closed"), 0.3) == []  # of the generation before
    bench.grant(second, 0.4)
    bench.step(0.5)
    assert said(bench.handle(KvSendFailed(second.key, "closed"), 0.6), HandoverFailed)[0].reason == "lost"


def test_the_transport_may_speak_of_what_is_gone(bench):
    reserve = said(bench.job(), Reserve)[0]
    bench.deliver(WORKER, Cancel(request_id=request(1), attempt=1), 0.2)
    assert bench.handle(KvSendFailed(reserve.key, "closed"), 0.3) == []


def test_a_candidate_known_to_be_another_incarnation_is_not_asked(bench):
    bench.handle(LinkClosed("d0"), 0.1)
    bench.handle(ProbeAnswered("d0", "refused"), 0.1)
    assert said(bench.job(now=0.2), Reserve)[0].key.decode == DECODES[1]


# -- blocks are released only when no transport reads them


@pytest.mark.rule(21)
def test_blocks_that_are_read_outlive_the_request(bench):
    """Rule 21."""
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    bench.step(0.3)
    actions = bench.deliver(WORKER, Cancel(request_id=request(1), attempt=1), 0.4)
    assert StopPieces(reserve.key) in actions
    assert bench.pool.num_held == 2
    assert not bench.role.knows(request(1), 1)
    assert not bench.role.is_quiescent()
    bench.stopped(actions, 0.5)
    assert bench.pool.num_held == 0
    assert bench.role.is_quiescent()


def test_the_next_attempt_does_not_take_blocks_over_that_are_still_read(bench):
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    bench.step(0.3)
    bench.hear(DECODES[0], CommitRefused(key=reserve.key, reason="not_reserved"), 0.4)
    table = set(bench.scheduler.block_table(1))
    actions = bench.job(now=0.5, attempt=2, placement_no=2, outputs=(50,))
    assert bench.pool.num_held > 2
    assert said(actions, Reserve)
    written = {block for plan in bench.steps for part in plan.scheduled for block in part.block_table[1:]}
    assert written
    assert not written & table


def owned_elsewhere(bench: PrefillBench) -> TransferKey:
    """A decode node has answered the Commit, at 0.4, and lacks pieces."""
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    bench.step(0.3)
    bench.committed(reserve.key, 0.4, complete=False)
    return reserve.key


@pytest.mark.rule(21)
def test_after_the_hand_over_blocks_stay_until_the_decode_node_has_every_piece(bench):
    """Rule 21, and 25: what comes damaged can be sent again."""
    key = owned_elsewhere(bench)
    bench.sent(0.5)
    assert bench.pool.num_held == 2
    bench.committed(key, 0.6)
    assert bench.pool.num_held == 0


@pytest.mark.rule(21)
def test_source_blocks_stay_while_their_pieces_wait_in_the_transport(bench):
    key = owned_elsewhere(bench)
    bench.tick(60.0)
    again = bench.committed(key, 60.1, complete=False, missing=(0,))
    assert said(again, Commit)[0].waiting == (0,)
    bench.sent(60.2)
    asked = bench.committed(key, 60.3, complete=False, missing=(0,))
    assert [action.piece.number for action in asked if isinstance(action, SendPiece)] == [0]


def test_source_blocks_are_not_kept_for_ever_when_no_answer_comes(bench):
    owned_elsewhere(bench)
    bench.sent(0.5)
    bench.tick(0.4 + 2 * bench.timers.piece_idle_timeout_s)
    assert bench.pool.num_held > 0
    bench.tick(0.6 + 2 * bench.timers.piece_idle_timeout_s)
    assert bench.pool.num_held == 0


@pytest.mark.rule(15)
def test_a_lost_worker_leaves_nothing(bench):
    """Rule 15."""
    bench.job(1)
    bench.job(2, candidates=0)
    for tick in range(1, 16):
        bench.tick(0.2 * tick, worker=False)
    assert bench.role.knows(request(1), 1)
    bench.tick(3.3, worker=False)
    assert bench.role.is_quiescent()
    assert bench.pool.num_held == 4  # the steps in flight still write them
    bench.step(3.4)
    bench.step(3.4)
    assert bench.pool.num_held == 0


# -- what it reports


def test_a_lost_first_token_that_ends_a_request_is_sent_with_the_list(bench):
    """Rules 14 and 15."""
    bench.job(max_new_tokens=1)
    token = said(bench.step(0.2), FirstToken)[0]
    assert said(bench.heartbeat(0.5, (1, 1)), FirstToken) == [token]
    assert said(bench.heartbeat(1.0, (1, 1), next_index=1), FirstToken) == []
    assert bench.heartbeat(1.5) == []
    assert bench.role.is_quiescent()


def test_an_early_token_that_does_not_end_it_is_sent_again_when_asked_for_only(bench):
    bench.job()
    token = said(bench.step(0.2), FirstToken)[0]
    assert said(bench.heartbeat(0.5, (1, 1)), FirstToken) == []
    assert said(bench.heartbeat(1.0, (1, 1), resend=True), FirstToken) == [token]


@pytest.mark.rule(14)
def test_a_hand_over_is_reported_again(bench):
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2)
    bench.step(0.3)
    bench.committed(reserve.key, 0.4)
    assert said(bench.heartbeat(0.5, (1, 1)), HandedOver)[0].decode == DECODES[0]


def test_a_prompt_without_a_token_ends_the_request(bench):
    bench.job()
    failed = said(bench.step(0.2, failed="not a number"), HandoverFailed)[0]
    assert (failed.reason, failed.retryable, failed.detail) == ("generation", False, "not a number")
    assert bench.pool.num_held == 0


@pytest.mark.rule(33)
def test_a_node_frees_by_its_own_backstop_a_second_after_the_workers_deadline(bench):
    """Rule 33."""
    bench.job(remaining_ms=500)
    assert said(bench.tick(1.5), HandoverFailed) == []
    assert said(bench.tick(1.7), HandoverFailed)[0].reason == "deadline"


def test_a_cancel_drops_attempts_up_to_its_own_and_of_its_worker_only(bench):
    bench.job(attempt=2, placement_no=2)
    bench.deliver(WORKER, Cancel(request_id=request(1), attempt=1), 0.2)
    other = Incarnation("9" * 32)
    bench.deliver(other, bench.role.decodes.links.hello, 0.2)
    bench.deliver(other, Cancel(request_id=request(1), attempt=9), 0.3)
    assert bench.role.knows(request(1), 2)
    bench.deliver(WORKER, Cancel(request_id=request(1), attempt=2), 0.4)
    assert bench.role.is_quiescent()


# -- links to decode nodes


def test_decode_nodes_get_the_list_of_open_hand_overs(bench):
    """Rules 12 and 16."""
    reserve = said(bench.job(), Reserve)[0]
    heartbeats = {
        a.peer: a.message for a in bench.tick(0.7) if isinstance(a, Send) and isinstance(a.message, Heartbeat)
    }
    assert [(e.request_id, e.generation) for e in heartbeats[DECODES[0]].wanted] == [
        (request(1), reserve.key.generation)
    ]
    assert heartbeats[DECODES[1]].wanted == ()
    assert heartbeats[DECODES[0]].as_of == reserve.transfer_no


def test_a_connection_begins_with_hello_and_kv_opens_with_the_welcome():
    bench = PrefillBench()
    actions = bench.job()
    hellos = [action for action in actions if isinstance(action, SendHello)]
    assert {action.endpoint for action in hellos} == {"d0", "d1"}
    assert isinstance(bench.handle(LinkConnected("d0"), 0.2)[0], SendHello)
    bench.link_up(0.3)
    assert bench.role.decodes.is_up(DECODES[0])


def test_a_link_that_comes_up_asks_immediately():
    bench = PrefillBench()
    assert said(bench.job(), Reserve)
    actions = bench.link_up(0.2)
    assert OpenKv(DECODES[0], ("kv",)) in actions
    assert said(actions, Reserve)[0].key.decode == DECODES[0]


def test_a_decode_node_that_refuses_hello_is_no_candidate(bench):
    bench.hear(DECODES[0], HelloRefused(reason="block_size: 4 != 8"), 0.1)
    assert said(bench.job(now=0.2), Reserve)[0].key.decode == DECODES[1]
    assert bench.role.decodes.links.links["d0"].refusal == "block_size: 4 != 8"


def test_a_decode_node_that_forgot_us_is_greeted_again(bench):
    actions = bench.hear(DECODES[0], WrongIncarnation(), 0.4)
    assert [action.endpoint for action in actions if isinstance(action, SendHello)] == ["d0"]


@pytest.mark.rule(6)
def test_workers_are_not_compared_but_prefill_nodes_are(bench):
    """Rule 6: the refusal names the field."""
    hello = bench.role.decodes.links.hello
    incompatible = Incarnation("8" * 32)
    wrong = replace(hello, compatibility=replace(COMPATIBILITY, block_size=8))
    assert said(bench.deliver(incompatible, wrong, 0.1), HelloRefused)[0].reason == "block_size: 4 != 8"
    more_ranks = replace(hello, compatibility=replace(COMPATIBILITY, tensor_parallel=2))
    assert said(bench.deliver(incompatible, more_ranks, 0.1), HelloRefused)[0].reason == "tensor_parallel: 1 != 2"
    old = replace(hello, kind="worker", compatibility=None, protocol_version=0)
    assert said(bench.deliver(incompatible, old, 0.2), HelloRefused)[0].reason == "protocol_version: 2 != 0"
    assert incompatible not in bench.core.clients.clients


# -- staging slots


def test_staging_slots_are_used_where_they_can_be_reached():
    bench = PrefillBench(staging_host="shm://here/")
    opened = [a for a in bench.link_up(staging=("shm://there/1", "shm://here/2")) if isinstance(a, OpenKv)]
    assert {action.staging for action in opened} == {"shm://here/2"}
    assert said(bench.job(), Reserve)[0].staged


@pytest.mark.parametrize(("own", "theirs"), [("", ("shm://here/2",)), ("shm://here/", ("shm://there/1",))])
def test_staging_slots_that_cannot_be_reached_are_not_asked_for(own, theirs):
    bench = PrefillBench(staging_host=own)
    opened = [action for action in bench.link_up(staging=theirs) if isinstance(action, OpenKv)]
    assert {action.staging for action in opened} == {""}
    assert not said(bench.job(), Reserve)[0].staged


@pytest.mark.rule(26)
def test_a_node_that_asks_whether_writing_has_stopped_gets_the_truth():
    """Rule 26: Revoke is said again until it has."""
    bench = PrefillBench(staging_host="shm://")
    bench.link_up(staging=("shm://here/2",))
    reserve = said(bench.job(), Reserve)[0]
    bench.grant(reserve, 0.2, slots=(0, 1))
    bench.step(0.3)
    revoke = Revoke(key=reserve.key, reason="staging slots")
    first = bench.hear(DECODES[0], revoke, 0.4)
    assert said(first, Abort) == [Abort(key=reserve.key, stopped=False)]
    assert said(bench.hear(DECODES[0], revoke, 0.9), Abort) == [Abort(key=reserve.key, stopped=False)]
    assert said(bench.stopped(first, 1.0), Abort) == [Abort(key=reserve.key)]
    assert said(bench.hear(DECODES[0], revoke, 1.4), Abort) == [Abort(key=reserve.key)]
