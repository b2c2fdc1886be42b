"""The shared table of token requests, and the bodies that no table holds, through real gunicorn and real nodes."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.http_app import connect
from tests.support.infer_cases import INFER_CASES, InferCase, base, encode, prompt, with_parameters
from tests.support.serve import Served

pytestmark = pytest.mark.e2e
PATH = "/v2/models/m/infer"
TOO_LARGE = 40_000_001
DEADLINE_S = 60.0


def output_ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    data: list[int] = answer.json()["outputs"][0]["data"]
    return data


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in INFER_CASES])
def test_table(http: httpx.Client, case: InferCase) -> None:
    answer = http.post(PATH, content=case.body)
    assert answer.status_code == case.status, answer.text
    body = answer.json()
    if case.status == 200:
        assert set(body) == {"id", "outputs"}
        (output,) = body["outputs"]
        assert (output["name"], output["datatype"]) == (case.output_name, "UINT32")
        assert output["shape"] == [1, len(output["data"])]
        assert case.num_tokens in (None, len(output["data"]))
    else:
        assert set(body) == {"error", "error_type"}
        assert body["error_type"] == "Input Validation Error"
        assert case.where in body["error"]


def in_pieces(num_bytes: int) -> Iterator[bytes]:
    """A body without a Content-Length."""
    while num_bytes > 0:
        yield b" " * min(num_bytes, 1 << 20)
        num_bytes -= 1 << 20


@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
def test_body_over_the_limit(http: httpx.Client, chunked: bool) -> None:
    answer = http.post(PATH, content=in_pieces(TOO_LARGE) if chunked else b" " * TOO_LARGE)
    assert answer.status_code == 413
    assert answer.json()["error_type"] == "Request Too Large"
    assert len(output_ids(http.post(PATH, content=encode(base())))) == 20


def test_body_at_the_limit_is_read(http: httpx.Client) -> None:
    text = encode(with_parameters(max_new_tokens=2))
    assert len(output_ids(http.post(PATH, content=text + b" " * (TOO_LARGE - 1 - len(text))))) == 2


@pytest.mark.asyncio
async def test_too_large_by_its_head_alone(served: Served) -> None:
    """The answer comes before a byte of the body."""
    async with connect(served.port) as client, asyncio.timeout(DEADLINE_S):
        await client.send(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {TOO_LARGE}\r\n\r\n".encode())
        assert (await client.head())[0] == 413


def test_a_million_ids(http: httpx.Client) -> None:
    answer = http.post(PATH, content=encode(prompt(1_000_000)))
    assert answer.status_code == 422
    assert "inputs[0].shape" in answer.json()["error"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "garbage", [b"\x00\xff\x16\x03\x01 no http\r\n\r\n", b"POST\r\n\r\n", b"GET / HTTP/9.9.9\r\n\r\n"]
)
async def test_garbage_that_is_no_http(served: Served, http: httpx.Client, garbage: bytes) -> None:
    async with connect(served.port) as client, asyncio.timeout(DEADLINE_S):
        await client.send(garbage)
        assert (await client.head())[0] == 400
    assert http.get("/v2/health/live").status_code == 200


@pytest.mark.asyncio
async def test_slow_body_delays_no_other(served: Served) -> None:
    body = encode(base())
    async with connect(served.port) as slow, asyncio.timeout(DEADLINE_S):
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await slow.send(head + body[:40])
        async with httpx.AsyncClient(base_url=served.url, timeout=DEADLINE_S, trust_env=False) as others:
            answers = await asyncio.gather(*(others.post(PATH, content=body) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        await slow.send(body[40:])
        assert (await slow.reply()).status == 200


@pytest.mark.asyncio
async def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    wanted = [encode(with_parameters(max_new_tokens=count)) for count in (9, 1, 5)]
    async with connect(served.port) as client, asyncio.timeout(DEADLINE_S):
        for body in wanted:
            await client.post(PATH, body)
        lengths = [_length((await client.reply()).json()) for _ in wanted]
    assert lengths == [9, 1, 5]


@pytest.mark.asyncio
async def test_unread_body_is_no_next_request(served: Served) -> None:
    """An answer that comes before the body leaves the connection in order."""
    unread = encode(base()) * 1000
    async with connect(served.port) as client, asyncio.timeout(DEADLINE_S):
        await client.send(
            f"POST /v2/models/unknown/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(unread)}\r\n\r\n".encode()
        )
        assert (await client.reply()).status == 404
        await client.send(unread)
        await client.post(PATH, encode(base()))
        assert (await client.reply()).status == 200


@pytest.mark.asyncio
async def test_body_that_waits_to_be_asked_for(served: Served) -> None:
    body = encode(base())
    async with connect(served.port) as client, asyncio.timeout(DEADLINE_S):
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
        await client.send(head.encode())
        assert (await client.head())[0] == 100
        await client.send(body)
        assert (await client.reply()).status == 200


@pytest.mark.asyncio
async def test_one_id_twice_in_flight(served: Served) -> None:
    body = encode(base(id="twin"))
    async with httpx.AsyncClient(base_url=served.url, timeout=DEADLINE_S, trust_env=False) as client:
        answers = await asyncio.gather(*(client.post(PATH, content=body) for _ in range(2)))
    assert [(answer.status_code, answer.json()["id"]) for answer in answers] == [(200, "twin")] * 2


@pytest.mark.parametrize(
    ("method", "path", "status", "error_type"),
    [
        ("POST", "/v2/models/unknown/infer", 404, "NotFoundError"),
        ("POST", "/v2/models/m/versions/1/infer", 404, "NotFoundError"),
        ("GET", "/nowhere", 404, "NotFoundError"),
        ("GET", PATH, 405, "MethodNotAllowed"),
        ("BREW", PATH, 405, "MethodNotAllowed"),
        ("DELETE", "/v2/health/live", 405, "MethodNotAllowed"),
    ],
)
def test_wrong_addresses(http: httpx.Client, method: str, path: str, status: int, error_type: str) -> None:
    answer = http.request(method, path, content=b"{ garbage")
    assert (answer.status_code, answer.json()["error_type"]) == (status, error_type)
    assert ("Allow" in answer.headers) == (status == 405)


def _length(body: dict[str, Any]) -> int:
    return len(body["outputs"][0]["data"])
