"""New requests that no pair of nodes can serve yet: they wait in their worker for new_request_wait_s. Rule 35."""

from array import array
from collections.abc import Collection

import pytest

from kvferry.common.base.errors import InvariantError, OverloadedError, UnavailableError
from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.events import LinkClosed, Tick
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Heartbeat, Job, Status
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.router.core.effects import FinishRequest
from kvferry.router.core.placer import Placer
from kvferry.router.core.request import Request, RequestState
from tests.support.generate_request import generate_request
from tests.unit.router.core.test_router import DECODE, PREFILL, REQUEST, Bench, ends, sent

NODES = ((PREFILL, "prefill"), (DECODE, "decode"))


@pytest.fixture
def bench():
    """A worker whose decode node is known but disconnected."""
    bench = Bench()
    bench.core.handle(Tick(), 0.0)
    bench.core.handle(LinkClosed("decode"), 0.1)
    return bench


def tick(bench: Bench, now: float, *away: str):
    """Receive a Status from all nodes except `away`, then tick."""
    for peer, endpoint in NODES:
        if endpoint not in away:
            bench.receive(peer, endpoint, Status(status_no=int(now * 1000)), now)
    effects = bench.core.handle(Tick(), now)
    bench.core.check_invariants()
    return effects


def submit(bench: Bench, number: int, now: float, tokens: int = 3, timeout_s: float = 30.0, model: str = "m"):
    sampling = SamplingParams(max_new_tokens=4)
    request_id = RequestId(f"{number:032x}")
    return bench.core.submit(
        generate_request(request_id, model, array("I", [1] * tokens), sampling, timeout_s=timeout_s), now
    )


@pytest.mark.rule(35)
def test_a_new_request_starts_when_a_pair_is_alive_and_keeps_its_age(bench):
    assert bench.submit(0.2) == []
    assert bench.core.requests[REQUEST].state is RequestState.WAITING
    assert not bench.core.is_quiescent()
    assert bench.core.not_ready_reason("m") == "no decode node is alive"
    assert sent(tick(bench, 1.0, "decode"), Job) == {}
    job = sent(tick(bench, 1.5), Job)[PREFILL]
    assert (job.attempt, job.waited_ms, job.remaining_ms) == (1, 1300, 28_700)


def test_a_waiting_new_request_is_in_no_wanted_set(bench):
    bench.submit(0.2)
    heartbeats = sent(tick(bench, 1.0, "decode"), Heartbeat)
    assert [heartbeat.wanted for heartbeat in heartbeats.values()] == [(), ()]


@pytest.mark.rule(35)
def test_after_new_wait_s_it_ends_with_the_missing_side(bench):
    bench.submit(0.2)
    assert ends(tick(bench, 2.15, "decode")) == []
    (end,) = ends(tick(bench, 2.2, "decode"))
    assert isinstance(end.error, UnavailableError)
    assert (str(end.error), end.error.retry_after_s, end.outcome) == ("no decode node is alive", 1, "error")
    assert bench.core.is_quiescent()


def test_nodes_that_come_at_the_last_moment_still_serve_it(bench):
    """As after a pause of the worker, when messages and the end of the wait come in one tick."""
    bench.submit(0.2)
    effects = tick(bench, 5.0)
    assert sent(effects, Job).keys() == {PREFILL}
    assert ends(effects) == []


def test_waiting_requests_start_together_oldest_first(bench):
    for number in range(3):
        submit(bench, number, 0.2 + number / 10)
    jobs = [effect.message for effect in tick(bench, 1.0) if isinstance(getattr(effect, "message", None), Job)]
    assert [int(job.request_id, 16) for job in jobs] == [0, 1, 2]


def test_new_wait_s_of_zero_refuses_immediately(bench):
    bench.core.timers = Timers(new_request_wait_s=0.0)
    with pytest.raises(UnavailableError, match="no decode node"):
        bench.submit(0.2)
    assert bench.core.is_quiescent()


def test_a_model_that_no_node_ever_registered_is_not_waited_for(bench):
    with pytest.raises(UnavailableError, match="no prefill node"):
        submit(bench, 1, 0.2, model="other")
    assert bench.core.is_quiescent()


def test_a_draining_worker_refuses_immediately_and_does_not_extend_the_wait(bench):
    bench.submit(0.2)
    bench.core.drain(0.3)
    with pytest.raises(UnavailableError, match="draining"):
        submit(bench, 1, 0.4)
    assert [str(end.error) for end in ends(tick(bench, 2.2, "decode"))] == ["no decode node is alive"]
    assert bench.core.is_quiescent()


def test_a_draining_worker_serves_waiting_requests_when_nodes_come(bench):
    bench.submit(0.2)
    bench.core.drain(0.3)
    assert sent(tick(bench, 1.0), Job).keys() == {PREFILL}


def test_an_earlier_deadline_ends_the_wait(bench):
    submit(bench, 1, 0.2, timeout_s=1.0)
    assert [end.outcome for end in ends(tick(bench, 1.2, "decode"))] == ["timeout"]


def test_a_cancelled_request_no_longer_waits(bench):
    bench.submit(0.2)
    (effect,) = bench.core.cancel(REQUEST, "left", 0.5)
    assert isinstance(effect, FinishRequest)
    assert bench.core.is_quiescent()
    assert sent(tick(bench, 1.0), Job) == {}


def test_waiting_prompt_tokens_are_bounded(bench):
    """One long prompt is accepted when nothing waits."""
    bench.core.limits = Limits(queued_tokens=10)
    submit(bench, 1, 0.2, tokens=12)
    with pytest.raises(OverloadedError, match="12 prompt tokens"):
        submit(bench, 2, 0.3, tokens=1)
    assert len(bench.core.requests) == 1


@pytest.mark.rule(35)
def test_waiting_requests_are_bounded(bench):
    bench.core.limits = Limits(queued_requests=2)
    submit(bench, 1, 0.2)
    submit(bench, 2, 0.2)
    with pytest.raises(OverloadedError, match="2 requests"):
        submit(bench, 3, 0.3)
    bench.core.cancel(RequestId(f"{1:032x}"), "left", 0.4)
    submit(bench, 3, 0.5)


def test_a_lost_request_waits_longer_than_new_wait_s():
    bench = Bench()
    bench.submit(0.1)
    bench.hand_over()
    bench.core.handle(LinkClosed("decode"), 0.3)
    for tenth in range(4, 60):
        assert ends(tick(bench, tenth / 10, "decode")) == []
    assert bench.core.requests[REQUEST].attempt == 1
    assert bench.core.requests[REQUEST].state is RequestState.WAITING


def test_check_invariants_rejects_tokens_without_an_attempt(bench):
    bench.submit(0.2)
    bench.core.requests[REQUEST].output_token_ids.append(1)
    with pytest.raises(InvariantError, match="no attempt"):
        bench.core.check_invariants()


def test_without_a_pair_of_nodes_one_request_is_tried_per_tick(bench, monkeypatch):
    """Many waiting requests do not cost a placement each."""
    for number in range(20):
        submit(bench, number, 0.2)
    asked = []

    def place(_: Placer, request: Request, now: float, full: Collection[Incarnation] = ()) -> None:
        asked.append(request.request_id)

    monkeypatch.setattr(Placer, "place", place)
    tick(bench, 0.5, "decode")
    assert len(asked) == 1
