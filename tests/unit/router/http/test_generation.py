"""A generation passes on a stream that keeps its contract and rejects one that does not; ends are counted once."""

import asyncio
from array import array
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from kvferry.common.base.clock import ManualClock
from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import RequestId
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.router.api import EndEvent, StreamEvent, TokensEvent, Usage
from kvferry.router.http.exchange import Exchange
from kvferry.router.http.generation import Generation
from kvferry.router.http.json_body.faults import describe_value
from kvferry.router.http.metrics import RouterMetrics
from tests.support.generate_request import generate_request

END = EndEvent("length", Usage(3, 2))
REQUEST = generate_request(RequestId("0" * 32), "m", array("I", [5, 6, 7]), SamplingParams(max_new_tokens=2))


class ListStream:
    """A stream of given events, in or out of order."""

    request_id = REQUEST.request_id

    def __init__(self, events: list[StreamEvent]) -> None:
        self._list = events
        self.cancelled_for: list[str] = []

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        for event in self._list:
            yield event

    def cancel(self, reason: str) -> None:
        self.cancelled_for.append(reason)


class Setting:
    """A generation over given events, with its exchange and metrics."""

    def __init__(self, events: list[StreamEvent]) -> None:
        async def receive():
            return {"type": "http.disconnect"}

        self.registry = CollectorRegistry()
        self.clock = ManualClock()
        self.exchange = Exchange({}, receive, REQUEST.request_id, self.clock.now())
        self.stream = ListStream(events)
        self.generation = Generation(REQUEST, self.stream, self.exchange, RouterMetrics(self.registry), self.clock)

    def value(self, name: str) -> float:
        found = self.registry.get_sample_value(name, {"model_name": "m"})
        return 0.0 if found is None else found


def test_events_are_passed_on_and_timed():
    async def run() -> None:
        s = Setting([TokensEvent(0, (8,)), TokensEvent(1, (9,)), END])
        assert (s.value("num_requests_waiting"), s.value("num_requests_running")) == (1, 0)
        s.clock.advance(0.5)
        assert await s.generation.next_event() == TokensEvent(0, (8,))
        s.generation.check_invariants()
        assert (s.value("num_requests_waiting"), s.value("num_requests_running")) == (0, 1)
        s.clock.advance(0.25)
        await s.generation.next_event()
        assert await s.generation.next_event() == END
        s.generation.check_invariants()
        s.exchange.check_invariants()
        assert (s.exchange.outcome, s.exchange.generation) == ("length", END)
        assert s.value("time_to_first_token_seconds_sum") == 0.5
        assert s.value("time_per_output_token_seconds_sum") == 0.25
        assert s.value("e2e_request_latency_seconds_sum") == 0.75
        for _ in range(2):
            s.generation.close()
        assert (s.value("num_requests_waiting"), s.value("num_requests_running")) == (0, 0)
        assert s.stream.cancelled_for == []

    asyncio.run(run())


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_an_abandoned_generation_is_cancelled_and_counted_once(num_tokens):
    async def run() -> None:
        s = Setting([TokensEvent(i, (8,)) for i in range(num_tokens + 1)])
        for _ in range(num_tokens):
            await s.generation.next_event()
        for _ in range(2):
            s.generation.close()
        assert s.stream.cancelled_for == ["abandoned"]
        assert s.exchange.outcome == "cancelled"
        assert (s.value("num_requests_waiting"), s.value("num_requests_running")) == (0, 0)
        s.generation.check_invariants()

    asyncio.run(run())


@pytest.mark.parametrize(
    "events",
    [
        [TokensEvent(1, (8,))],
        [TokensEvent(0, (8, 9)), TokensEvent(1, (9,))],
        [TokensEvent(0, (8,)), TokensEvent(2, (9,))],
        [TokensEvent(0, ())],
        [TokensEvent(0, (8,))],
        [],
        [END, TokensEvent(0, (8,))],
    ],
)
def test_an_invalid_stream_raises(events):
    async def run() -> None:
        generation = Setting(events).generation
        while True:
            await generation.next_event()

    with pytest.raises(InvariantError):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (5, "5"),
        pytest.param(10**5000, "a huge integer", id="huge"),
        (1.5, "1.5"),
        ("x", "'x'"),
        ("x" * 10**6, "a string of 1000000 characters"),
        ([1, 2], "[1, 2]"),
        ([1] * 10**6, "an array of 1000000"),
        ([["x"]], "an array of 1"),
        ({"a": 1}, "an object"),
    ],
)
def test_values_in_error_texts_are_short(value, text):
    assert describe_value(value) == text
