"""Streams through real gunicorn: the same tokens as the unary answer and as transformers, sent while they are made."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Reference
from tests.support.bodies import body_of
from tests.support.cluster import tokens_of
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.processes import suspended
from tests.support.serve import Served, wait_until
from tests.support.tiny_llama import random_prompt

pytestmark = pytest.mark.e2e
PATH = "/v2/models/m/infer"
EVENTS = {"Accept": "text/event-stream"}
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 2**63 + 9, "temperature": 1.4, "top_k": 200, "top_p": 0.9}


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer, as they come."""
    assert answer.status_code == 200, answer.read()
    assert answer.headers["content-type"].startswith("text/event-stream")
    for line in answer.iter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


def stream(http: httpx.Client, prompt: list[int], path: str = PATH, **parameters: Any) -> list[dict[str, Any]]:
    with http.stream("POST", path, content=body_of(prompt, **parameters), headers=EVENTS) as answer:
        return list(events_of(answer))


def unary(http: httpx.Client, prompt: list[int], **parameters: Any) -> list[int]:
    answer = http.post(PATH, content=body_of(prompt, **parameters))
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["outputs"][0]["data"]
    return ids


@pytest.mark.parametrize("length", [1, 15, 16, 17, 300, 2048])
def test_stream_and_unary_equal_transformers(http: httpx.Client, reference: Reference, length: int) -> None:
    prompt = random_prompt(length, length, VOCAB_SIZE)
    expected = reference.tokens(prompt, 12)
    assert unary(http, prompt, max_new_tokens=12) == expected
    events = stream(http, prompt, max_new_tokens=12)
    assert tokens_of(events) == expected
    assert events[-1]["finish_reason"] == "length"
    assert events[-1]["nodes"] == {"prefill": "prefill-0", "decode": "decode-0"}
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, 12)
    assert sum("finish_reason" in event for event in events) == 1


def test_the_draw_hangs_on_the_seed_alone(served: Served, http: httpx.Client) -> None:
    prompt = random_prompt(7, 40, VOCAB_SIZE)
    alone = unary(http, prompt, max_new_tokens=30, **SAMPLED)
    assert len(set(alone)) > 10
    assert tokens_of(stream(http, prompt, max_new_tokens=30, **SAMPLED)) == alone

    def ask(number: int) -> list[int]:
        with served.client() as client:
            if number % 2:
                return unary(client, prompt, max_new_tokens=30, **SAMPLED)
            return tokens_of(stream(client, random_prompt(number, 20, VOCAB_SIZE), max_new_tokens=30))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert all(answer == alone for answer in answers[1::2])


def test_events_come_while_tokens_are_made(served: Served, http: httpx.Client) -> None:
    """The first one is the prefill node's: it comes although the decode node stands."""
    body = body_of(random_prompt(1, 10, VOCAB_SIZE), max_new_tokens=512)
    with ExitStack() as standing:
        standing.enter_context(suspended(served.node("decode-0")))
        with http.stream("POST", PATH, content=body, headers=EVENTS) as answer:
            events = events_of(answer)
            first = next(events)
            wait_until(lambda: served.metrics()["num_requests_running"] == 1, "it is counted as running")
            standing.close()
            rest = list(events)
    assert len(tokens_of([first, *rest])) == 512
    assert len(rest) > 100


def test_infer_stream_needs_no_accept_header(http: httpx.Client) -> None:
    prompt = random_prompt(2, 10, VOCAB_SIZE)
    with http.stream("POST", "/v2/models/m/infer_stream", content=body_of(prompt, max_new_tokens=5)) as answer:
        assert tokens_of(list(events_of(answer))) == unary(http, prompt, max_new_tokens=5)


def test_fault_of_a_stream_request_has_its_status(http: httpx.Client) -> None:
    answer = http.post(PATH, content=body_of([5], temperature=0), headers=EVENTS)
    assert answer.status_code == 422
    assert answer.json()["error_type"] == "Input Validation Error"
