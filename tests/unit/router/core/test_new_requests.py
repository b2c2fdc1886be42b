"""New requests that no pair of nodes can serve yet: they wait in their worker for a moment. Rule 35."""

from array import array
from collections.abc import Collection

import pytest

from kvferry.common.base.errors import (
    InvariantError,
    OverloadedError,
    UnavailableError,
)
from kvferry.common.base.ids import (
    Incarnation,
    RequestId,
)
from kvferry.common.cluster.events import (
    LinkClosed,
    Tick,
)
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Heartbeat, Job, Status
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.router.api import GenerateRequest
from kvferry.router.core.effects import FinishRequest
from kvferry.router.core.placer import Placer
from kvferry.router.core.request import Request, RequestState
from tests.unit.router.core.test_router import DECODE, PREFILL, REQUEST, Bench, ends, said

NODES = ((PREFILL, "prefill"), (DECODE, "decode"))


@pytest.fixture
def bench():
    """The decode node is known and away."""
    bench = Bench()
    bench.core.handle(Tick(), 0.0)
    bench.core.handle(LinkClosed("decode"), 0.1)
    return bench


def tick(bench: Bench, now: float, *away: str):
    """All nodes but those that are away are heard, then time goes by."""
    for peer, endpoint in NODES:
        if endpoint not in away:
            bench.tell(peer, endpoint, Status(status_no=int(now * 1000)), now)
    effects = bench.core.handle(Tick(), now)
    bench.core.check_invariants()
    return effects


def submit(bench: Bench, number: int, now: float, tokens: int = 3, timeout_s: float = 30.0, model: str = "m"):
    sampling = SamplingParams(max_new_tokens=4)
    request_id = RequestId(f"{number:032x}")
    return bench.core.submit(
        GenerateRequest(request_id, model, array("I", [1] * tokens), sampling, timeout_s=timeout_s), now
    )


def test_it_starts_as_soon_as_a_pair_is_known_and_keeps_its_age(bench):
    assert bench.submit(0.2) == []
    assert bench.core.requests[REQUEST].state is RequestState.WAITING
    assert not bench.core.is_quiescent()
    assert bench.core.not_ready_reason("m") == "no decode node is alive"
    assert said(tick(bench, 1.0, "decode"), Job) == {}
    job = said(tick(bench, 1.5), Job)[PREFILL]
    assert (job.attempt, job.waited_ms, job.remaining_ms) == (1, 1300, 28_700)


def test_nothing_is_asked_of_a_node_meanwhile(bench):
    bench.submit(0.2)
    heartbeats = said(tick(bench, 1.0, "decode"), Heartbeat)
    assert [beat.entries for beat in heartbeats.values()] == [(), ()]


def test_after_the_bound_it_is_refused_with_what_is_missing(bench):
    bench.submit(0.2)
    assert ends(tick(bench, 2.15, "decode")) == []
    (end,) = ends(tick(bench, 2.2, "decode"))
    assert isinstance(end.error, UnavailableError)
    assert (str(end.error), end.error.retry_after_s, end.outcome) == ("no decode node is alive", 1, "error")
    assert bench.core.is_quiescent()


def test_nodes_that_come_in_the_last_moment_still_serve_it(bench):
    """As after a pause of the worker itself, when messages and the end of the wait come at once."""
    bench.submit(0.2)
    effects = tick(bench, 5.0)
    assert said(effects, Job).keys() == {PREFILL}
    assert ends(effects) == []


def test_all_that_wait_start_together_the_oldest_first(bench):
    for number in range(3):
        submit(bench, number, 0.2 + number / 10)
    jobs = [effect.message for effect in tick(bench, 1.0) if isinstance(getattr(effect, "message", None), Job)]
    assert [int(job.request_id, 16) for job in jobs] == [0, 1, 2]


def test_a_bound_of_zero_refuses_at_once(bench):
    bench.core.timers = Timers(new_request_wait_s=0.0)
    with pytest.raises(UnavailableError, match="no decode node"):
        bench.submit(0.2)
    assert bench.core.is_quiescent()


def test_a_model_that_no_node_ever_told_of_is_not_waited_for(bench):
    with pytest.raises(UnavailableError, match="no prefill node"):
        submit(bench, 1, 0.2, model="other")
    assert bench.core.is_quiescent()


def test_a_draining_worker_refuses_at_once_and_waits_no_longer_for_what_it_took(bench):
    bench.submit(0.2)
    bench.core.drain(0.3)
    with pytest.raises(UnavailableError, match="draining"):
        submit(bench, 1, 0.4)
    assert [str(end.error) for end in ends(tick(bench, 2.2, "decode"))] == ["no decode node is alive"]
    assert bench.core.is_quiescent()


def test_what_waits_is_served_by_a_draining_worker_when_nodes_come(bench):
    bench.submit(0.2)
    bench.core.drain(0.3)
    assert said(tick(bench, 1.0), Job).keys() == {PREFILL}


def test_its_deadline_comes_first_where_it_is_shorter(bench):
    submit(bench, 1, 0.2, timeout_s=1.0)
    assert [end.outcome for end in ends(tick(bench, 1.2, "decode"))] == ["timeout"]


def test_a_client_that_leaves_waits_for_nothing(bench):
    bench.submit(0.2)
    (effect,) = bench.core.cancel(REQUEST, "left", 0.5)
    assert isinstance(effect, FinishRequest)
    assert bench.core.is_quiescent()
    assert said(tick(bench, 1.0), Job) == {}


def test_prompt_tokens_that_wait_are_bounded(bench):
    """One long prompt is taken when nothing waits."""
    bench.core.limits = Limits(queued_tokens=10)
    submit(bench, 1, 0.2, tokens=12)
    with pytest.raises(OverloadedError, match="12 prompt tokens"):
        submit(bench, 2, 0.3, tokens=1)
    assert len(bench.core.requests) == 1


def test_requests_that_wait_are_bounded(bench):
    bench.core.limits = Limits(queued_requests=2)
    submit(bench, 1, 0.2)
    submit(bench, 2, 0.2)
    with pytest.raises(OverloadedError, match="2 requests"):
        submit(bench, 3, 0.3)
    bench.core.cancel(RequestId(f"{1:032x}"), "left", 0.4)
    submit(bench, 3, 0.5)


def test_a_lost_request_waits_beyond_the_bound_of_new_ones():
    bench = Bench()
    bench.submit(0.1)
    bench.hand_over()
    bench.core.handle(LinkClosed("decode"), 0.3)
    for tenth in range(4, 60):
        assert ends(tick(bench, tenth / 10, "decode")) == []
    assert bench.core.requests[REQUEST].attempt == 1
    assert bench.core.requests[REQUEST].state is RequestState.WAITING


def test_the_tables_know_what_a_request_without_an_attempt_may_have(bench):
    bench.submit(0.2)
    bench.core.requests[REQUEST].output_token_ids.append(1)
    with pytest.raises(InvariantError, match="no attempt"):
        bench.core.check_invariants()


def test_where_no_pair_is_there_one_look_a_tick_is_enough(bench, monkeypatch):
    """A crowd that waits costs no plan each."""
    for number in range(20):
        submit(bench, number, 0.2)
    asked = []

    def plan(_: Placer, request: Request, now: float, full: Collection[Incarnation] = ()) -> None:
        asked.append(request.request_id)

    monkeypatch.setattr(Placer, "plan", plan)
    tick(bench, 0.5, "decode")
    assert len(asked) == 1
