"""The decode role: how requests wait for room, run, end, and are reported again."""

import pytest
from msgspec.structs import replace

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import RequestId
from kvferry.common.cluster.actions import ForgetPieces
from kvferry.common.cluster.events import PieceArrived, Tick
from kvferry.common.config.protocol import Limits
from kvferry.common.kv.host_pool import HostPool
from kvferry.common.protocol.messages import (
    Abort,
    Cancel,
    Commit,
    CommitRefused,
    Committed,
    Gone,
    Granted,
    Heartbeat,
    Queued,
    Refused,
    Revoke,
    Status,
    Tokens,
)
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceStatus
from kvferry.common.scheduling.step import StepResult
from kvferry.decode_node.receive_table import ReceiveState
from kvferry.decode_node.role import DecodeRole
from tests.support.role_context import role_context
from tests.unit.decode_node.test_decode import LAYERS, REQUEST, WORKER, Bench, said

OTHERS = tuple(RequestId(f"{number:032x}") for number in range(9))


@pytest.fixture
def bench():
    return Bench()


def make_bench(
    num_blocks: int = 16,
    config: SchedulerConfig | None = None,
    limits: Limits | None = None,
    host: HostPool | None = None,
) -> Bench:
    bench = Bench(num_blocks)
    scheduler = Scheduler(config or SchedulerConfig(), bench.pool, host)
    bench.role = DecodeRole(role_context(scheduler, bench.clients, limits=limits))
    return bench


def run(bench: Bench, now: float = 0.2) -> None:
    """A request that has everything."""
    bench.reserve(0.1)
    bench.commit(now)
    bench.arrives(0, now)
    bench.arrives(1, now)


def step(bench: Bench, now: float, token: int = 7, failed: str = ""):
    """One step of the engine for all that run."""
    plan, events = bench.role.context.scheduler.schedule(now)
    assert plan is not None
    ids = [part.seq_id for part in plan.scheduled]
    sampled, failures = ({}, dict.fromkeys(ids, failed)) if failed else (dict.fromkeys(ids, token), {})
    result = StepResult(plan.step_id, sampled, failures)
    events = [*events, *bench.role.context.scheduler.apply(result, now)]
    return bench.done([action for event in events for action in bench.role.on_scheduler(event, now)], now)


def spoken(actions):
    return [(e.first_index, e.token_ids, e.finish) for message in said(actions, Tokens) for e in message.entries]


def entry_of(bench: Bench):
    return next(iter(bench.role.entries))


# -- room


def test_what_finds_no_room_is_queued_and_granted_in_its_turn():
    bench = make_bench(num_blocks=4)
    bench.reserve()
    second, third = bench.key(request=OTHERS[1]), bench.key(request=OTHERS[2])
    assert said(bench.reserve(0.2, key=second), Queued) == [Queued(key=second)]
    assert said(bench.reserve(0.3, key=third), Queued) == [Queued(key=third)]
    assert said(bench.reserve(0.4, key=second), Queued) == [Queued(key=second)]  # asked again, answered again
    freed = bench.done(bench.role.on_message(bench.worker, Cancel(request_id=REQUEST, attempt=1), 0.5), 0.5)
    assert [granted.key for granted in said(freed, Granted)] == [second]


@pytest.mark.rule(17)
@pytest.mark.parametrize(("asked_at", "first"), [(5.0, OTHERS[2]), (25.0, OTHERS[1])])
def test_the_better_class_goes_first_until_the_other_has_waited_long(asked_at, first):
    """Rule 17 on this role: class, raised by waiting, then age; and no request overtakes the head."""
    bench = make_bench(num_blocks=4)
    bench.reserve(priority=1)
    bench.reserve(0.2, key=bench.key(request=OTHERS[1]))
    bench.heartbeat_of_worker(asked_at, as_of=0)
    bench.reserve(asked_at, key=bench.key(request=OTHERS[2]), priority=1)
    freed = bench.done(bench.role.on_message(bench.prefill, Abort(key=bench.key()), asked_at), asked_at)
    assert [granted.key.request_id for granted in said(freed, Granted)] == [first]


def test_more_than_a_few_do_not_wait():
    bench = make_bench(num_blocks=4, limits=Limits(queued_reservations=1))
    bench.reserve()
    bench.reserve(0.2, key=bench.key(request=OTHERS[1]))
    assert said(bench.reserve(0.3, key=bench.key(request=OTHERS[2])), Refused)[0].reason == "full"


def test_what_could_never_fit_is_refused_immediately():
    bench = make_bench(num_blocks=1)
    assert "KV blocks" in said(bench.reserve(), Refused)[0].reason
    assert bench.role.is_quiescent()


def test_a_reserve_that_is_asked_again_is_granted_again_once_reserved(bench):
    first = said(bench.reserve(), Granted)
    assert said(bench.reserve(0.2), Granted) == first
    assert bench.pool.num_held == 2


def test_an_old_copy_of_a_reserve_changes_nothing_after_the_commit(bench):
    bench.reserve()
    bench.commit()
    assert bench.reserve(0.3) == []


def test_a_reserve_that_the_prefill_nodes_list_no_longer_has_is_refused(bench):
    """Rules 13 and 16: both lists keep a reservation."""
    bench.prefill.update_wanted(Heartbeat(heartbeat_no=1, as_of=1), 0.1)
    assert said(bench.reserve(0.2), Refused)[0].reason == "gone"


@pytest.mark.rule(16)
def test_a_reservation_goes_with_either_list(bench):
    """Rule 16."""
    bench.reserve()
    bench.prefill.update_wanted(Heartbeat(heartbeat_no=1, as_of=1), 0.2)
    assert bench.done(bench.role.on_heartbeat(bench.prefill, 0.2), 0.2) == [ForgetPieces(bench.key())]
    assert bench.role.is_quiescent()
    other = Bench()
    other.reserve()
    assert other.heartbeat_of_worker(0.2, as_of=1) == [ForgetPieces(bench.key())]
    assert other.role.is_quiescent()


@pytest.mark.rule(37)
def test_a_drain_takes_back_what_is_not_committed_and_refuses_more(bench):
    """Rules 28 and 37."""
    run(bench)
    bench.reserve(0.3, key=bench.key(request=OTHERS[1]))
    actions = bench.done(bench.role.drain(0.4), 0.4)
    assert said(actions, Revoke) == [Revoke(key=bench.key(request=OTHERS[1]), reason="draining")]
    assert entry_of(bench).state is ReceiveState.RUNNING
    assert said(bench.reserve(0.5, key=bench.key(request=OTHERS[2])), Refused)[0].reason == "draining"


def test_what_the_drain_does_not_finish_is_preempted(bench):
    run(bench)
    actions = bench.done(bench.role.preempt_all(0.4), 0.4)
    assert [gone.reason for gone in said(actions, Gone)] == ["preempted"]
    assert bench.pool.num_held == 0
    again = bench.heartbeat_of_worker(0.9, as_of=1, attempts=(1,), expected=True)
    assert [gone.reason for gone in said(again, Gone)] == ["preempted"]


def test_a_lost_prefill_node_leaves_no_reservation_but_what_is_owned_stays(bench):
    """Rules 15 and 16."""
    run(bench)
    bench.reserve(0.3, key=bench.key(request=OTHERS[1]))
    assert bench.done(bench.role.on_client_lost(bench.prefill, 0.4), 0.4) == [
        ForgetPieces(bench.key(request=OTHERS[1]))
    ]
    assert entry_of(bench).state is ReceiveState.RUNNING
    bench.done(bench.role.on_client_lost(bench.worker, 0.5), 0.5)
    assert bench.role.is_quiescent()
    assert bench.pool.num_held == 0


# -- taking over


def test_without_a_reservation_a_commit_is_refused(bench):
    assert said(bench.commit(), CommitRefused)[0].reason == "not_reserved"
    blocked = make_bench(num_blocks=4)
    blocked.reserve(key=blocked.key(request=OTHERS[1]))
    assert said(blocked.reserve(), Queued)
    assert said(blocked.commit(), CommitRefused)[0].reason == "not_reserved"


def test_a_commit_that_comes_last_starts_immediately(bench):
    bench.reserve()
    bench.arrives(0)
    bench.arrives(1)
    assert said(bench.commit(0.4), Committed) == [Committed(key=bench.key(), complete=True)]


@pytest.mark.rule(23)
@pytest.mark.parametrize(("pieces", "first_token_pos"), [(1, 0), (2, 4), (0, 0)])
def test_pieces_that_do_not_cover_what_was_asked_for_lose_the_request_and_no_more(bench, pieces, first_token_pos):
    """Rules 23 and 25: nothing is decoded from what is not right as a whole, whatever its Commit says."""
    bench.reserve()
    for number in range(pieces):
        bench.arrives(number)
    wrong = Commit(
        key=bench.key(),
        num_pieces=pieces,
        first_token_pos=first_token_pos,
        num_tokens=6,
        token_id=5,
    )
    actions = bench.done(bench.role.on_message(bench.prefill, wrong, 0.4), 0.4)
    assert [gone.reason for gone in said(actions, Gone)] == ["lost"]
    assert bench.pool.num_held == 0


def test_a_commit_that_counts_more_pieces_than_there_can_be_is_refused(bench):
    """Nothing is counted up to a number that makes no sense."""
    bench.reserve()
    assert "pieces" in said(bench.commit(pieces=6 * LAYERS + 1), CommitRefused)[0].reason
    assert bench.pool.num_held == 0
    bench.reserve(0.3)
    assert said(bench.commit(0.4, pieces=6 * LAYERS), Committed)


def test_a_commit_of_another_length_than_was_reserved_loses_the_request(bench):
    bench.reserve()
    wrong = Commit(
        key=bench.key(),
        num_pieces=0,
        first_token_pos=0,
        num_tokens=0,
        token_id=5,
    )
    actions = bench.done(bench.role.on_message(bench.prefill, wrong, 0.4), 0.4)
    assert said(actions, Gone)[0].reason == "lost"
    assert "ids are known" in said(actions, Gone)[0].detail


def test_pieces_of_another_key_change_nothing(bench):
    """Rule 26: and the transport drops them before any block."""
    bench.reserve()
    bench.done(bench.role.on_message(bench.worker, Cancel(request_id=REQUEST, attempt=1), 0.2), 0.2)
    assert bench.arrives(0) == []
    assert bench.damaged(0) == []
    run(bench)
    assert bench.arrives(0, 0.5) == []
    assert bench.damaged(0, 0.5) == []


def test_a_second_copy_that_comes_damaged_harms_nothing(bench):
    bench.reserve()
    bench.arrives(0)
    assert bench.damaged(0) == []
    bench.arrives(1)
    assert said(bench.commit(0.4), Committed)[0].complete


# -- running and ending


def test_tokens_go_out_step_by_step_and_the_end_with_the_last(bench):
    """Rules 29 and 30: the stream starts with the handed token; one message a step."""
    bench.reserve()
    bench.commit()
    bench.arrives(0)
    assert spoken(bench.arrives(1)) == [(0, (5,), None)]
    first, second, third = (step(bench, now, token) for now, token in ((0.4, 7), (0.5, 8), (0.6, 9)))
    assert [spoken(actions) for actions in (first, second, third)] == [
        [(1, (7,), None)],
        [(2, (8,), None)],
        [(3, (9,), "length")],
    ]
    assert [said(actions, Tokens)[0].link_seq for actions in (first, second, third)] == [2, 3, 4]
    assert bench.pool.num_held == 0


@pytest.mark.rule(15)
def test_a_finish_record_is_reported_until_the_wanted_set_drops_it(bench):
    """Rule 15."""
    run(bench)
    for now in (0.4, 0.5, 0.6):
        step(bench, now)
    for now in (1.0, 1.5):
        reported = bench.heartbeat_of_worker(now, as_of=1, attempts=(1,), expected=True)
        assert spoken(reported) == [(0, (5, 7, 7, 7), "length")]
    bench.heartbeat_of_worker(2.0, as_of=1)
    assert bench.role.is_quiescent()


def test_running_requests_are_reported_only_when_a_gap_was_seen(bench):
    """Rule 14."""
    run(bench)
    step(bench, 0.4)
    assert bench.heartbeat_of_worker(0.5, as_of=1, attempts=(1,), expected=True) == []
    entry = entry_of(bench)
    bench.role._outbox.add_from(entry, 1)
    assert spoken(bench.done([], 0.6)) == [(1, (7,), None)]


def test_a_request_that_cannot_continue_is_a_failure_of_its_own(bench):
    run(bench)
    actions = step(bench, 0.4, failed="not a number")
    (message,) = said(actions, Tokens)
    assert [(e.first_index, e.token_ids, e.error) for e in message.entries] == [(1, (), "not a number")]
    assert bench.pool.num_held == 0
    (again,) = said(bench.heartbeat_of_worker(0.5, as_of=1, attempts=(1,), expected=True), Tokens)
    assert again.entries[0].error == "not a number"


def fill(bench: Bench) -> None:
    """Two requests that run, and blocks for no more."""
    run(bench)
    other = bench.key(request=OTHERS[1])
    bench.reserve(0.3, key=other)
    ledger = bench.role.entries.by_key[other].ledger
    assert ledger is not None
    granted_from = ledger.first_token_pos
    whole = replace(bench.piece(0), key=other, layer_end=LAYERS, token_start=granted_from)
    bench.role.on_event(PieceArrived(whole), 0.3)
    commit = Commit(
        key=other,
        num_pieces=1,
        first_token_pos=granted_from,
        num_tokens=6,
        token_id=5,
    )
    bench.done(bench.role.on_message(bench.prefill, commit, 0.3), 0.3)


@pytest.mark.rule(36)
def test_out_of_blocks_the_youngest_is_preempted_and_its_worker_notified():
    """Rule 36."""
    bench = make_bench(num_blocks=4)
    fill(bench)
    gone = []
    for now in (0.4, 0.5, 0.6):
        gone += said(step(bench, now), Gone)
    assert [(message.request_id, message.reason) for message in gone] == [(OTHERS[1], "preempted")]


@pytest.mark.rule(36)
@pytest.mark.parametrize("way", ["cancel", "list", "lost worker", "deadline", "drain", "nothing"])
@pytest.mark.parametrize("steps", [2, 3], ids=["going to the host", "on the host"])
def test_a_request_that_is_swapped_out_ends_as_any_other(way: str, steps: int):
    host = HostPool(4)
    bench = make_bench(num_blocks=4, host=host)
    fill(bench)
    for now in (0.4, 0.5, 0.6)[:steps]:
        assert said(step(bench, now), Gone) == []
    plan = bench.role.context.scheduler.schedule(0.6).batch if steps == 2 else None
    entry = bench.role.entries.by_key[bench.key(request=OTHERS[1])]
    assert entry.seq_id is not None
    assert bench.role.context.scheduler.status(entry.seq_id) is (
        SequenceStatus.SWAPPING if steps == 2 else SequenceStatus.SWAPPED
    )
    role, worker = bench.role, bench.worker
    match way:
        case "cancel":
            role.on_message(worker, Cancel(request_id=OTHERS[1], attempt=1), 0.6)
        case "list":
            worker.update_wanted(Heartbeat(heartbeat_no=99, as_of=99), 0.6)
            role.on_heartbeat(worker, 0.6)
        case "lost worker":
            role.on_client_lost(worker, 0.6)
        case "deadline":
            assert "deadline" in {message.detail for message in said(role.tick(99.0), Gone)}
        case "drain":
            assert {m.reason for m in said(role.preempt_all(0.6), Gone)} == {"preempted"}
        case "nothing":
            pass
    if plan is not None:
        role.context.scheduler.apply(StepResult(plan.step_id, {part.seq_id: 7 for part in plan.scheduled}), 0.6)
    role.context.scheduler.check_invariants()
    assert (host.num_held > 0) == (way == "nothing")


@pytest.mark.rule(33)
def test_the_backstop_of_a_deadline_frees_and_reports(bench):
    """Rule 33: one second after the worker's own."""
    bench.reserve()
    assert bench.role.tick(61.0) == []
    assert said(bench.done(bench.role.tick(61.2), 61.2), Refused)[0].reason == "deadline"
    assert bench.role.context.scheduler.is_quiescent()
    assert bench.role.tick(61.3) == []
    bench.role.on_message(bench.prefill, Abort(key=bench.key()), 61.4)
    assert bench.role.is_quiescent()


def test_the_backstop_of_a_running_request_is_a_loss(bench):
    run(bench)
    assert said(bench.done(bench.role.tick(61.2), 61.2), Gone)[0].reason == "lost"
    assert bench.done(bench.role.tick(70.0), 70.0) == []  # a record has no deadline


def test_a_cancel_drops_attempts_up_to_its_own_and_of_its_worker_only(bench):
    bench.reserve(key=bench.key(attempt=2))
    assert bench.role.on_message(bench.worker, Cancel(request_id=REQUEST, attempt=1), 0.2) == []
    assert bench.role.on_message(bench.prefill, Cancel(request_id=REQUEST, attempt=2), 0.2) == []
    assert bench.role.on_message(bench.worker, Cancel(request_id=OTHERS[1], attempt=2), 0.2) == []
    assert bench.role.knows(REQUEST, 2)
    bench.done(bench.role.on_message(bench.worker, Cancel(request_id=REQUEST, attempt=2), 0.3), 0.3)
    assert not bench.role.knows(REQUEST, 2)


@pytest.mark.rule(30)
def test_a_worker_that_left_is_not_written_to(bench):
    """Rule 30: the outbox holds nothing for a client that is gone."""
    bench.reserve()
    bench.commit()
    bench.arrives(0)
    bench.role.on_event(PieceArrived(bench.piece(1)), 0.3)
    bench.clients.remove(WORKER)
    assert bench.role.flush(0.3) == []
    assert bench.role._outbox.is_empty


def test_a_token_out_of_its_place_is_a_bug_that_is_reported(bench):
    run(bench)
    with pytest.raises(InvariantError, match="does not continue"):
        bench.role._outbox.add_token(entry_of(bench), 9, 5)
    with pytest.raises(InvariantError, match="does not continue"):
        bench.role._outbox.add_token(entry_of(bench), 9, 0)


def test_what_is_not_for_this_role_changes_nothing(bench):
    assert bench.role.on_event(Tick(), 0.1) == []
    assert bench.role.on_message(bench.worker, Status(status_no=1), 0.1) == []


# -- damage


def damage_state(bench):
    entry_of(bench).machine.state = ReceiveState.FINISHED


def damage_commit(bench):
    entry_of(bench).commit = None


def damage_plan_index(bench):
    entries = bench.role.entries
    entries.by_attempt = {key._replace(attempt=7): entry for key, entry in entries.by_attempt.items()}


def damage_key_index(bench):
    bench.role.entries.by_key.clear()


def damage_queue(bench):
    bench.role.entries.queued[bench.key()] = entry_of(bench)


def damage_seq_index(bench):
    bench.role.entries.by_seq.clear()


def damage_extra_sequence(bench):
    bench.role.entries.by_seq[99] = entry_of(bench)


@pytest.mark.parametrize(
    "damage",
    [
        damage_state,
        damage_commit,
        damage_plan_index,
        damage_key_index,
        damage_queue,
        damage_seq_index,
        damage_extra_sequence,
    ],
)
def test_check_invariants_sees_every_kind_of_damage(bench, damage):
    run(bench)
    bench.role.check_invariants()
    damage(bench)
    with pytest.raises(InvariantError):
        bench.role.check_invariants()
