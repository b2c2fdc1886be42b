"""Server-sent events: their shapes, when the head is sent, and errors before and after the head."""

import asyncio
import json

import pytest
from falcon import testing

from kvferry.common.base.errors import GenerationError, OverloadedError
from kvferry.router.http.sse import wants_event_stream
from tests.support.fake_service import Script, expected_token
from tests.support.http_app import Connection, HttpApp, connect, serve
from tests.support.infer_cases import base, encode

PATH = "/v2/models/m/infer"
BODY = encode(base(parameters={"max_new_tokens": 5}))
EVENTS = {"Accept": "text/event-stream"}


def parse(text: str) -> list[dict[str, object]]:
    """The events of a complete stream, each one `data:` line."""
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def stream(http: HttpApp, body: bytes = BODY, path: str = PATH) -> list[dict[str, object]]:
    result = testing.TestClient(http.app).simulate_post(path, body=body, headers=EVENTS)
    assert result.status_code == 200, result.text
    assert result.headers["content-type"] == "text/event-stream"
    assert "content-length" not in result.headers
    return parse(result.text)


@pytest.mark.parametrize("tokens_per_event", [1, 2, 5])
def test_each_token_comes_once_and_the_last_event_has_the_end(tokens_per_event):
    http = HttpApp()
    http.service.script = Script(tokens_per_event=tokens_per_event)
    *tokens, last = stream(http)
    (fake,) = http.service.streams
    ids: list[object] = []
    for event in tokens:
        assert event.keys() == {"id", "index", "token_ids"}
        assert (event["id"], event["index"]) == ("42", len(ids))
        assert isinstance(event["token_ids"], list)
        ids += event["token_ids"]
    assert ids == [expected_token(fake.request, i) for i in range(5)]
    assert last == {
        "id": "42",
        "index": 5,
        "token_ids": [],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 1},
        "nodes": {"prefill": "p0", "decode": "d0"},
    }


def test_infer_stream_needs_no_accept_header():
    result = testing.TestClient(HttpApp().app).simulate_post("/v2/models/m/infer_stream", body=BODY)
    assert result.headers["content-type"] == "text/event-stream"
    assert len(parse(result.text)) == 6


def test_events_and_one_json_object_have_the_same_tokens():
    http = HttpApp()
    streamed = [event["token_ids"] for event in stream(http)[:-1]]
    unary = testing.TestClient(http.app).simulate_post(PATH, body=BODY).json
    assert streamed == [[token_id] for token_id in unary["outputs"][0]["data"]]


def test_a_missing_id_is_made_by_the_router():
    events = stream(HttpApp(), encode(base(id=...)))
    assert {event["id"] for event in events} == {f"{1:032x}"}


def test_a_stream_without_a_token_has_one_event():
    http = HttpApp()
    http.service.script = Script(end_after=0, outcome="stop")
    (last,) = stream(http)
    assert (last["index"], last["token_ids"], last["finish_reason"]) == (0, [], "stop")


@pytest.mark.parametrize(
    ("script", "status", "error_type"),
    [
        (Script(end_after=0, outcome="timeout"), 408, "Request Timeout"),
        (Script(end_after=0, outcome="error", error=GenerationError("nan")), 424, "Generation Error"),
        (Script(end_after=0, outcome="error", error=OverloadedError("full")), 429, "Too Many Requests"),
        (Script(end_after=0, raises=ZeroDivisionError("oops")), 500, "Incomplete Generation"),
    ],
)
def test_an_error_before_the_first_token_is_a_plain_answer(script, status, error_type):
    http = HttpApp()
    http.service.script = script
    result = testing.TestClient(http.app).simulate_post(PATH, body=BODY, headers=EVENTS)
    assert result.status_code == status
    assert result.headers["content-type"] == "application/json"
    assert result.json["error_type"] == error_type
    http.service.check_invariants()


def test_an_invalid_body_is_a_plain_answer():
    result = testing.TestClient(HttpApp().app).simulate_post(PATH, body=b"{", headers=EVENTS)
    assert result.status_code == 422
    assert result.json["error_type"] == "Input Validation Error"


@pytest.mark.parametrize(
    ("script", "error_type", "finish_reason"),
    [
        (Script(end_after=3, outcome="timeout"), "Request Timeout", "timeout"),
        (Script(end_after=3, outcome="error", error=GenerationError("nan")), "Generation Error", "error"),
        (Script(end_after=3, outcome="cancelled"), "Incomplete Generation", "cancelled"),
        (Script(end_after=3, raises=ZeroDivisionError("oops")), "Incomplete Generation", "error"),
        (Script(end_after=3, forget_end=True), "Incomplete Generation", "error"),
    ],
)
def test_an_error_after_the_head_is_the_last_event(script, error_type, finish_reason):
    http = HttpApp()
    http.service.script = script
    *tokens, last = stream(http)
    assert [event["index"] for event in tokens] == [0, 1, 2]
    assert last.keys() >= {"id", "error", "error_type", "finish_reason"}
    assert "token_ids" not in last
    assert (last["id"], last["error_type"], last["finish_reason"]) == ("42", error_type, finish_reason)
    assert "oops" not in str(last["error"])
    http.service.check_invariants()


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("text/event-stream", True),
        ("TEXT/Event-Stream", True),
        ("text/event-stream; q=0.9", True),
        ("text/event-stream, application/json", True),
        ("application/json, text/event-stream", False),
        ("application/json;q=0.5, text/event-stream", True),
        ("text/event-stream;q=0", False),
        ("text/event-stream;q=x", False),
        ("text/event-stream, */*", True),
        ("text/*", False),
        ("*/*", False),
        ("", False),
        ("application/json", False),
    ],
)
def test_which_accept_headers_ask_for_events(accept, wanted):
    assert wants_event_stream(accept) is wanted


async def _next_event(client: Connection) -> dict[str, object]:
    (event,) = parse((await client.chunk()).decode())
    return event


def test_the_head_waits_for_the_first_token_only():
    async def run() -> None:
        http = HttpApp()
        http.service.script = Script(hold_after=0)
        async with serve(http) as port, connect(port) as client:
            await client.post(PATH, BODY, "Accept: text/event-stream")
            fake = await http.service.submitted.get()
            await fake.holding.wait()
            assert not http.access.records
            first = asyncio.ensure_future(client.head())
            await asyncio.sleep(0)
            assert not first.done()
            fake.release()
            assert (await first)[0] == 200
            assert (await _next_event(client))["index"] == 0

    asyncio.run(run())


def test_each_token_is_sent_before_the_next_is_made():
    async def run() -> None:
        http = HttpApp()
        http.service.script = Script(hold_after=3)
        async with serve(http) as port, connect(port) as client:
            await client.post(PATH, BODY, "Accept: text/event-stream")
            fake = await http.service.submitted.get()
            assert (await client.head())[0] == 200
            assert [(await _next_event(client))["index"] for _ in range(3)] == [0, 1, 2]
            assert not fake.ended
            fake.release()
            assert [(await _next_event(client))["index"] for _ in range(3)] == [3, 4, 5]
            assert await client.chunk() == b""
            http.service.check_invariants()

    asyncio.run(run())
