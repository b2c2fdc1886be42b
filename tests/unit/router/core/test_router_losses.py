"""The router's requests when nodes refuse, fail, preempt or die: rules 3, 27, 29, 31 and 33 to 35."""

import random
from array import array

import pytest
from msgspec.structs import replace

from kvferry.common.base.errors import GenerationError, InvariantError, KvferryError, OverloadedError, UnavailableError
from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.actions import SendHello
from kvferry.common.cluster.events import Announced, DrainRequested, LinkClosed, LinkConnected, ProbeAnswered, Tick
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import (
    Announce,
    Cancel,
    FirstToken,
    Gone,
    HandedOver,
    HandoverFailed,
    Heartbeat,
    HelloRefused,
    Job,
    NodeLoad,
    Status,
    Tokens,
    TokensEntry,
    Welcome,
    WrongIncarnation,
)
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.router.core.request import RequestState
from kvferry.router.core.router_core import RouterCore
from tests.support.generate_request import generate_request
from tests.unit.router.core.test_router import DECODE, PREFILL, REQUEST, Bench, delivered, ends, sent

UNKNOWN = Incarnation("9" * 32)
TIMERS = Timers()


@pytest.fixture
def bench():
    bench = Bench()
    bench.core.handle(Tick(), 0.0)
    return bench


def failed(bench: Bench, now: float, attempt: int = 1, **fields):
    message = HandoverFailed(request_id=REQUEST, attempt=attempt, **{"reason": "no_room", **fields})
    return bench.receive(PREFILL, "prefill", message, now)


def gone(bench: Bench, peer: Incarnation, reason, now: float, attempt: int = 1):
    endpoint = "prefill" if peer == PREFILL else "decode"
    return bench.receive(peer, endpoint, Gone(request_id=REQUEST, attempt=attempt, reason=reason), now)


def tick(bench: Bench, now: float):
    """Receive a Status from both nodes, then tick."""
    for peer, endpoint in ((PREFILL, "prefill"), (DECODE, "decode")):
        bench.receive(peer, endpoint, Status(status_no=int(now * 1000)), now)
    effects = bench.core.handle(Tick(), now)
    bench.core.check_invariants()
    return effects


def placed_again(bench: Bench, start: float, end: float):
    """The Job of the next placement and when it was sent; None if there is none until `end`."""
    for tenth in range(round(start * 20), round(end * 20) + 1):
        jobs = sent(tick(bench, tenth / 20), Job)
        if jobs:
            return jobs[PREFILL], tenth / 20
    return None


def request(bench: Bench):
    return bench.core.requests[REQUEST]


def welcome_of(bench: Bench) -> Welcome:
    welcome = bench.core.links.links["decode"].welcome
    assert welcome is not None
    return welcome


# -- admission


def test_without_nodes_a_request_is_refused_before_it_starts():
    core = RouterCore("w", Timers(), Limits(), random.Random(0))
    asked = generate_request(REQUEST, "m", array("I", [1]), SamplingParams(max_new_tokens=4))
    with pytest.raises(UnavailableError, match="no prefill node"):
        core.submit(asked, 0.1)
    assert core.is_quiescent()


def test_a_prefill_node_without_a_decode_node_serves_nothing(bench):
    bench.core.handle(LinkClosed("decode"), 0.1)
    assert bench.core.not_ready_reason("m") == "no decode node is alive"
    assert bench.core.not_ready_reason("other") == "no prefill node is alive"


@pytest.mark.rule(35)
def test_beyond_the_bound_on_waiting_tokens_new_requests_are_refused():
    """Rule 35: 429 before the head is sent; and one long prompt is accepted when nothing waits."""
    bench = Bench()
    bench.core.limits = Limits(queued_tokens=4)
    bench.submit()
    status = Status(status_no=2, load=NodeLoad(waiting_tokens=3))
    bench.receive(PREFILL, "prefill", status, 0.2)
    with pytest.raises(OverloadedError):
        bench.submit(0.3)
    assert len(bench.core.requests) == 1


def test_tokens_booked_since_the_last_status_count():
    bench = Bench()
    bench.core.limits = Limits(queued_tokens=4)
    bench.submit()
    with pytest.raises(OverloadedError):
        bench.submit()


# -- refusals cost no attempt


@pytest.mark.rule(27, 34)
def test_no_room_costs_no_attempt_and_is_spaced_by_a_growing_backoff(bench):
    """Rule 34."""
    bench.submit()
    now, waits = 0.2, []
    for attempt in range(1, 8):
        failed(bench, now, attempt)
        again = placed_again(bench, now, now + 5)
        assert again is not None
        waits.append(again[1] - now)
        assert again[0].attempt == attempt + 1
        now = again[1]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0], abs=0.051)
    assert request(bench).losses == 0


@pytest.mark.rule(36)
def test_a_preemption_costs_no_attempt_and_is_counted_in_the_job(bench):
    """Rules 34 and 36."""
    bench.submit()
    bench.hand_over()
    bench.tokens(1, 0, (5, 6))
    gone(bench, DECODE, "preempted", 0.5)
    again = placed_again(bench, 0.5, 2.0)
    assert again is not None
    assert (again[0].spec.times_preempted, list(again[0].spec.output_token_ids)) == (1, [5, 6])
    assert request(bench).losses == 0


def test_preemption_by_a_draining_prefill_node_costs_no_attempt(bench):
    bench.submit()
    gone(bench, PREFILL, "preempted", 0.3)
    assert request(bench).state is RequestState.WAITING
    assert request(bench).losses == 0


def test_progress_ends_the_backoff_and_the_count_of_losses(bench):
    bench.submit()
    failed(bench, 0.2, reason="lost")
    job = placed_again(bench, 0.2, 2.0)[0]
    assert (request(bench).setbacks, request(bench).losses) == (1, 1)
    bench.receive(PREFILL, "prefill", HandedOver(request_id=REQUEST, attempt=job.attempt, decode=DECODE), 0.8)
    bench.tokens(1, 0, (5,), attempt=job.attempt, now=0.9)
    assert (request(bench).setbacks, request(bench).losses) == (0, 1)  # the prefill node's token is no progress yet
    bench.tokens(2, 1, (6,), attempt=job.attempt, now=1.0)
    assert request(bench).losses == 0


@pytest.mark.rule(35)
def test_an_overloaded_node_refuses_a_new_request_but_not_one_placed_again(bench):
    bench.submit()
    (end,) = ends(failed(bench, 0.2, reason="overloaded"))
    assert isinstance(end.error, OverloadedError)
    other = Bench()
    other.submit()
    gone(other, PREFILL, "lost", 0.2)
    assert placed_again(other, 0.2, 1.0) is not None
    assert ends(failed(other, 1.1, attempt=2, reason="overloaded")) == []


# -- losses are counted


@pytest.mark.rule(34)
def test_losses_in_a_row_end_a_request(bench):
    """Rule 34."""
    bench.submit()
    now = 0.2
    for attempt in range(1, bench.core.limits.max_attempts):
        assert ends(gone(bench, PREFILL, "lost", now, attempt)) == []
        again = placed_again(bench, now, now + 1)
        assert again is not None
        assert again[1] - now <= TIMERS.retry_jitter_s + 0.06
        now = again[1]
    (end,) = ends(gone(bench, PREFILL, "lost", now, bench.core.limits.max_attempts))
    assert (end.outcome, type(end.error)) == ("error", KvferryError)


def test_failed_commits_in_a_row_end_a_request(bench):
    bench.submit()
    now = 0.2
    for attempt in range(1, bench.core.limits.max_attempts):
        assert ends(failed(bench, now, attempt, reason="commit_unanswered", commit_sent=True, decode=DECODE)) == []
        again = placed_again(bench, now, now + 5)
        assert again is not None
        now = again[1]
    (end,) = ends(failed(bench, now, bench.core.limits.max_attempts, reason="lost"))
    assert "hand-over failed" in str(end.error)


@pytest.mark.rule(34)
def test_a_request_that_ran_at_two_crashes_ends(bench):
    """Rule 34: it may be the cause."""
    bench.submit()
    for number, decode in enumerate((DECODE, Incarnation("5" * 32)), start=1):
        now = 10.0 * number
        if decode != DECODE:
            bench.receive(decode, "decode", welcome_of(bench), now - 5)
            assert placed_again_with(bench, decode, now - 5, now) is not None
        attempt = request(bench).attempt
        bench.receive(PREFILL, "prefill", HandedOver(request_id=REQUEST, attempt=attempt, decode=decode), now)
        assert request(bench).state is RequestState.HANDED_OVER
        bench.core.handle(LinkClosed("decode"), now)
        effects = bench.core.handle(ProbeAnswered("decode", "refused"), now)
        assert len(ends(effects)) == number - 1
    assert bench.core.is_quiescent()


@pytest.mark.rule(34)
def test_a_node_without_progress_is_a_loss_and_no_crash(bench):
    """Rule 34, ADR 0027: it may only be slow."""
    bench.submit()
    bench.hand_over()
    now = 0.2
    while request(bench).state is RequestState.HANDED_OVER and now < 60:
        now += 0.1
        number = int(now * 1000)
        bench.receive(PREFILL, "prefill", Status(status_no=number), now)
        bench.receive(DECODE, "decode", Status(status_no=number, work_waiting=True), now)
        bench.core.handle(Tick(), now)
    assert now == pytest.approx(TIMERS.engine_stall_s, abs=0.5)
    assert (request(bench).losses, request(bench).crashes) == (1, 0)


def placed_again_with(bench: Bench, decode: Incarnation, start: float, end: float):
    for tenth in range(round(start * 20), round(end * 20) + 1):
        now = tenth / 20
        bench.receive(PREFILL, "prefill", Status(status_no=int(now * 1000)), now)
        bench.receive(decode, "decode", Status(status_no=int(now * 1000)), now)
        if jobs := sent(bench.core.handle(Tick(), now), Job):
            return jobs[PREFILL]
    return None


def test_the_death_of_the_prefill_node_is_a_loss_only_before_the_hand_over(bench):
    bench.submit()
    bench.core.handle(LinkClosed("prefill"), 0.2)
    bench.core.handle(ProbeAnswered("prefill", "refused"), 0.3)
    assert (request(bench).state, request(bench).losses) == (RequestState.WAITING, 1)
    other = Bench()
    other.submit()
    other.hand_over()
    other.core.handle(LinkClosed("prefill"), 0.3)
    other.core.handle(ProbeAnswered("prefill", "refused"), 0.4)
    assert other.core.requests[REQUEST].state is RequestState.HANDED_OVER


def test_a_hand_over_to_an_ended_incarnation_is_a_loss(bench):
    bench.submit()
    bench.receive(PREFILL, "prefill", HandedOver(request_id=REQUEST, attempt=1, decode=UNKNOWN), 0.2)
    assert (request(bench).state, request(bench).losses, request(bench).crashes) == (RequestState.WAITING, 1, 0)


def test_without_a_pair_of_nodes_a_request_waits(bench):
    bench.submit()
    bench.core.handle(LinkClosed("prefill"), 0.2)
    bench.core.handle(ProbeAnswered("prefill", "refused"), 0.2)
    for tenth in range(3, 20):
        bench.receive(DECODE, "decode", Status(status_no=tenth + 1), tenth / 10)
        assert sent(bench.core.handle(Tick(), tenth / 10), Job) == {}
    assert request(bench).state is RequestState.WAITING
    assert request(bench).losses == 1


@pytest.mark.rule(34)
def test_a_pair_that_failed_is_avoided_for_a_while():
    """Rule 34."""
    bench = Bench()
    second = Incarnation("6" * 32)
    bench.core.add_static("decode2", 0.0)
    bench.receive(second, "decode2", replace(welcome_of(bench), name="decode2"), 0.0)
    load = NodeLoad(total_blocks=100, free_blocks=90, block_size=4)
    bench.receive(DECODE, "decode", Status(status_no=2, load=load), 0.1)
    bench.receive(second, "decode2", Status(status_no=2, load=replace(load, free_blocks=50)), 0.1)
    job = sent(bench.submit(), Job)[PREFILL]
    assert job.candidates[0].incarnation == DECODE
    failed(bench, 0.2, reason="lost", commit_sent=True, decode=DECODE)
    for peer, endpoint, free in ((DECODE, "decode", 90), (second, "decode2", 50)):
        bench.receive(peer, endpoint, Status(status_no=3, load=replace(load, free_blocks=free)), 0.3)
    job = sent(bench.core.handle(Tick(), 0.4), Job)[PREFILL]
    assert [candidate.incarnation for candidate in job.candidates] == [second, DECODE]
    bench.core.placer._expire(0.3 + TIMERS.pair_penalty_s)
    assert bench.core.placer._penalties == {}


# -- ends


def test_a_prompt_that_fails_to_generate_ends_with_its_reason(bench):
    bench.submit()
    (end,) = ends(failed(bench, 0.2, reason="generation", detail="not a number", retryable=False))
    assert isinstance(end.error, GenerationError)
    assert "not a number" in str(end.error)


def test_a_job_that_no_node_accepts_ends_with_an_error(bench):
    bench.submit()
    (end,) = ends(failed(bench, 0.2, reason="invalid", detail="too long", retryable=False))
    assert type(end.error) is KvferryError


def test_a_failure_while_decoding_ends_with_its_reason(bench):
    bench.submit()
    bench.hand_over()
    entry = TokensEntry(request_id=REQUEST, attempt=1, first_index=0, token_ids=(), error="not a number")
    (end,) = ends(bench.receive(DECODE, "decode", Tokens(link_seq=1, entries=(entry,)), 0.3))
    assert isinstance(end.error, GenerationError)


def test_a_request_for_one_token_ends_with_the_prefill_nodes_finish(bench):
    bench.submit()
    token = FirstToken(request_id=REQUEST, attempt=1, index=0, token_id=5, finish="stop", cached_tokens=2)
    effects = bench.receive(PREFILL, "prefill", token, 0.2)
    assert delivered(effects) == [5]
    (end,) = ends(effects)
    assert (end.outcome, end.usage.completion_tokens, end.usage.cached_tokens) == ("stop", 1, 2)


@pytest.mark.rule(37)
def test_requests_that_outlast_a_drain_end_with_an_error(bench):
    """Rule 37."""
    bench.submit()
    bench.core.drain(0.2)
    bench.core.drain(5.0)  # again: the bound counts from the first
    core, bound = bench.core, 0.2 + TIMERS.worker_drain_s
    core.requests[REQUEST].deadline = bound + 99
    core._table._deadlines[:] = [(bound + 99, REQUEST)]
    assert ends(core.handle(Tick(), bound - 0.1)) == []
    (end,) = ends(core.handle(Tick(), bound + 0.1))
    assert isinstance(end.error, UnavailableError)


def test_a_worker_that_closes_cancels_everywhere(bench):
    bench.submit()
    effects = bench.core.close(0.3)
    assert sent(effects, Cancel).keys() == {PREFILL, DECODE}
    assert [end.outcome for end in ends(effects)] == ["error"]


# -- reports that change nothing


@pytest.mark.rule(3)
@pytest.mark.parametrize("message", [
    HandedOver(request_id=REQUEST, attempt=1, decode=DECODE),
    HandoverFailed(request_id=REQUEST, attempt=1, reason="no_room"),
    FirstToken(request_id=REQUEST, attempt=1, index=0, token_id=5),
    Gone(request_id=REQUEST, attempt=1, reason="lost"),
])  # fmt: skip
def test_reports_count_only_from_the_node_of_the_attempt(bench, message):
    """Rule 3."""
    bench.submit()
    assert bench.receive(DECODE, "decode", message, 0.2) == []
    assert (request(bench).state, request(bench).next_index) == (RequestState.PLACED, 0)


def test_after_the_hand_over_only_reports_of_the_owner_count(bench):
    bench.submit()
    bench.hand_over()
    assert gone(bench, PREFILL, "lost", 0.3) == []
    assert failed(bench, 0.3) == []
    entry = TokensEntry(request_id=REQUEST, attempt=1, first_index=0, token_ids=(9,))
    assert bench.receive(PREFILL, "prefill", Tokens(link_seq=1, entries=(entry,)), 0.4) == []
    assert request(bench).decode == DECODE


def test_reports_of_unknown_requests_change_nothing(bench):
    other = RequestId("f" * 32)
    assert bench.receive(PREFILL, "prefill", Gone(request_id=other, attempt=1, reason="lost"), 0.2) == []
    entry = TokensEntry(request_id=other, attempt=1, first_index=0, token_ids=(9,))
    assert bench.receive(DECODE, "decode", Tokens(link_seq=1, entries=(entry,)), 0.3) == []


def test_a_repeated_handed_over_changes_nothing(bench):
    bench.submit()
    bench.hand_over()
    assert bench.hand_over(0.3) == []
    assert request(bench).state is RequestState.HANDED_OVER


@pytest.mark.rule(7)
def test_tokens_from_a_candidate_make_it_the_owner_if_handed_over_was_lost(bench):
    """Rule 7: no rule depends on the arrival of a message."""
    bench.submit()
    assert delivered(bench.tokens(1, 0, (5,))) == [5]
    assert request(bench).decode == DECODE


def test_a_message_before_welcome_is_answered_with_hello():
    core = RouterCore("w", Timers(), Limits(), random.Random(0))
    bench = Bench()
    bench.core = core
    core.handle(Announced(UNKNOWN, Announce(name="d", role="decode", model="m", endpoint="decode")), 0.1)
    effects = bench.receive(UNKNOWN, "decode", Status(status_no=1), 0.2)
    assert [type(effect) for effect in effects] == [SendHello]
    assert bench.receive(UNKNOWN, "decode", HelloRefused(reason="protocol_version: 2 != 1"), 0.3) == []
    assert core.links.links["decode"].refusal


def test_a_node_that_forgot_this_worker_gets_a_new_hello(bench):
    effects = bench.receive(DECODE, "decode", WrongIncarnation(), 0.5)
    assert [type(effect) for effect in effects] == [SendHello]
    assert [type(effect) for effect in bench.core.handle(LinkConnected("decode"), 0.6)] == [SendHello]


def test_messages_of_a_later_protocol_are_ignored(bench):
    assert bench.receive(DECODE, "decode", Cancel(request_id=REQUEST, attempt=1), 0.2) == []


def test_an_event_that_no_worker_gets_is_a_bug(bench):
    with pytest.raises(InvariantError, match="DrainRequested"):
        bench.core.handle(DrainRequested(), 0.1)


# -- resends


@pytest.mark.rule(30)
def test_a_lost_last_tokens_message_is_revealed_by_the_status(bench):
    """Rule 30."""
    bench.submit()
    bench.hand_over()
    tick(bench, 0.5)
    bench.receive(DECODE, "decode", Status(status_no=1000, link_seq=3), 0.6)
    heartbeats = sent(bench.core.handle(Tick(), 0.65), Heartbeat)
    assert heartbeats.keys() == {DECODE}
    assert heartbeats[DECODE].wanted[0].resend


@pytest.mark.rule(30)
def test_a_skipped_link_seq_requests_tokens_again_for_all_requests_of_the_node(bench):
    bench.submit()
    bench.hand_over()
    tick(bench, 0.5)
    assert bench.core.handle(Tick(), 0.55) == []
    bench.receive(DECODE, "decode", Tokens(link_seq=5, entries=()), 0.6)
    assert sent(bench.core.handle(Tick(), 0.65), Heartbeat)[DECODE].wanted[0].resend


@pytest.mark.rule(14, 33)
def test_the_same_job_is_sent_again_only_if_the_node_never_received_it(bench):
    """Rule 14."""
    first = sent(bench.submit(), Job)[PREFILL]
    again = sent(gone(bench, PREFILL, "never_known", 1.1), Job)[PREFILL]
    assert (again.attempt, again.placement_no) == (first.attempt, first.placement_no)
    assert again.remaining_ms == first.remaining_ms - 1000  # rule 33
    assert again.waited_ms == first.waited_ms + 1000


# -- damage


def damage_placement(bench):
    request(bench).placement = None


def damage_decode(bench):
    request(bench).decode = DECODE


def damage_tokens(bench):
    request(bench).output_token_ids.extend(range(9))


def damage_key(bench):
    bench.core.requests[RequestId("f" * 32)] = bench.core.requests.pop(REQUEST)


def damage_waiting(bench):
    bench.core._table._waiting[REQUEST] = None


def damage_waiting_ended(bench):
    bench.core._table._waiting[RequestId("f" * 32)] = None


def damage_deadline(bench):
    bench.core._table._deadlines.clear()


@pytest.mark.parametrize(
    "damage",
    [
        damage_placement,
        damage_decode,
        damage_tokens,
        damage_key,
        damage_waiting,
        damage_waiting_ended,
        damage_deadline,
    ],
)
def test_check_invariants_detects_every_kind_of_damage(bench, damage):
    bench.submit()
    bench.core.check_invariants()
    damage(bench)
    with pytest.raises(InvariantError):
        bench.core.check_invariants()
