"""The bound on tokens that are placed again at one prefill node: rule 35."""

from array import array

import pytest

from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.events import Tick
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import Gone, HandedOver, HandoverFailed, Job, Status
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.router.core.effects import FinishRequest
from kvferry.router.core.request import RequestState
from tests.support.generate_request import generate_request
from tests.unit.router.core.test_router import DECODE, PREFILL, Bench

BOUND = 20


@pytest.fixture
def bench():
    """A worker that places at most twenty tokens again at one prefill node."""
    bench = Bench()
    bench.core._table.limits = Limits(retry_tokens_per_node=BOUND)
    bench.core.handle(Tick(), 0.0)
    return bench


def rid(number: int) -> RequestId:
    return RequestId(f"{number:032x}")


def submit(bench: Bench, number: int, now: float, tokens: int = 8, timeout_s: float = 60.0):
    sampling = SamplingParams(max_new_tokens=4)
    asked = generate_request(rid(number), "m", array("I", [1] * tokens), sampling, timeout_s=timeout_s)
    return bench.core.submit(asked, now)


def lose(bench: Bench, number: int, now: float):
    """The prefill node reports that it dropped the request."""
    attempt = bench.core.requests[rid(number)].attempt
    bench.receive(PREFILL, "prefill", Gone(request_id=rid(number), attempt=attempt, reason="lost"), now)


def ticks(bench: Bench, start: float, end: float) -> list[object]:
    """Receive a Status from all nodes and tick, every tenth of a second."""
    effects: list[object] = []
    for tenth in range(round(start * 10), round(end * 10) + 1):
        for peer, endpoint in ((PREFILL, "prefill"), (DECODE, "decode")):
            bench.receive(peer, endpoint, Status(status_no=tenth + 2), tenth / 10)
        effects += bench.core.handle(Tick(), tenth / 10)
        bench.core.check_invariants()
    return effects


def placed(effects) -> list[int]:
    """Numbers of the requests whose Jobs were sent."""
    return [int(e.message.request_id, 16) for e in effects if isinstance(e, Send) and isinstance(e.message, Job)]


def lose_five(bench: Bench) -> None:
    """The youngest is lost first."""
    for number in range(1, 6):
        assert placed(submit(bench, number, 0.1 + number / 100)) == [number]  # rule 35: first attempts have no bound
    for number in range(5, 0, -1):
        lose(bench, number, 0.3)


@pytest.mark.rule(35)
def test_the_oldest_are_placed_and_the_rest_waits_for_the_budget(bench):
    lose_five(bench)
    assert placed(ticks(bench, 0.5, 1.5)) == [1, 2]
    bench.receive(PREFILL, "prefill", HandedOver(request_id=rid(1), attempt=2, decode=DECODE), 1.5)
    assert placed(ticks(bench, 1.6, 2.0)) == [3]
    bench.core.cancel(rid(2), "left", 2.0)
    bench.core.cancel(rid(3), "left", 2.0)
    assert placed(ticks(bench, 2.1, 2.5)) == [4, 5]


def test_new_requests_do_not_wait_for_the_budget(bench):
    lose_five(bench)
    ticks(bench, 0.5, 1.0)
    assert placed(submit(bench, 9, 1.0)) == [9]


@pytest.mark.rule(35)
def test_a_deadline_holds_while_a_request_waits_for_the_budget(bench):
    submit(bench, 1, 0.1)
    submit(bench, 2, 0.1)
    submit(bench, 3, 0.1, timeout_s=2.0)
    for number in (1, 2, 3):
        lose(bench, number, 0.3)
    effects = ticks(bench, 0.5, 2.5)
    assert placed(effects) == [1, 2]
    assert [(e.request_id, e.event.outcome) for e in effects if isinstance(e, FinishRequest)] == [(rid(3), "timeout")]


@pytest.mark.rule(35)
def test_a_long_request_is_not_overtaken_by_short_ones_and_is_placed_alone(bench):
    submit(bench, 1, 0.10)
    submit(bench, 2, 0.11, tokens=99)
    submit(bench, 3, 0.12)
    for number in (1, 2, 3):
        lose(bench, number, 0.3)
    assert placed(ticks(bench, 0.5, 1.5)) == [1]
    bench.receive(PREFILL, "prefill", HandedOver(request_id=rid(1), attempt=2, decode=DECODE), 1.5)
    assert placed(ticks(bench, 1.6, 2.5)) == [2]


@pytest.mark.rule(35)
def test_another_node_gets_the_requests_beyond_the_bound(bench):
    second = Incarnation("5" * 32)
    lose_five(bench)
    ticks(bench, 0.5, 1.0)
    welcome = bench.core.links.links["prefill"].welcome
    bench.core.add_static("prefill2", 1.0)
    bench.receive(second, "prefill2", welcome, 1.0)
    bench.receive(second, "prefill2", Status(status_no=1), 1.0)
    effects = ticks(bench, 1.1, 1.4)
    assert [e.peer for e in effects if isinstance(e, Send) and isinstance(e.message, Job)] == [second, second]


def test_requests_with_held_kv_do_not_use_the_budget(bench):
    for number in range(1, 6):
        submit(bench, number, 0.1 + number / 100)
        failed = HandoverFailed(request_id=rid(number), attempt=1, reason="no_room", retained=True)
        bench.receive(PREFILL, "prefill", failed, 0.3)
    assert sorted(placed(ticks(bench, 0.5, 1.0))) == [1, 2, 3, 4, 5]
    assert {r.state for r in bench.core.requests.values()} == {RequestState.PLACED}
    submit(bench, 6, 1.0)
    lose(bench, 6, 1.0)
    assert placed(ticks(bench, 1.1, 1.5)) == [6]
