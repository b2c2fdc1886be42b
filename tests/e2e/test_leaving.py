"""Clients that leave, deadlines that pass, queues that are full: a true status, and nothing stays held on any node."""

import asyncio
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.support.bodies import body_of
from tests.support.cluster import tokens_of
from tests.support.eventually import PATIENCE_S
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.node_watch import NodeWatch
from tests.support.raw_stream import RawRequest
from tests.support.serve import Served, wait_until
from tests.support.tiny_llama import random_prompt

pytestmark = pytest.mark.e2e
NODES = ("prefill-0", "decode-0")
LONG = 2400
"""Tokens of a generation that no client waits for."""


@pytest.fixture(scope="module")
def long_served(serve: Serve) -> Iterator[Served]:
    """A cluster whose generations may be long and whose queue is short."""
    with serve(
        settings={
            "router.max_iter_times": LONG,
            "limits.queued_requests": 4,
            "prefill.max_running": 1,
            "timers.heartbeat_s": 0.1,  # a node's load is seen while its request still runs
        }
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def watch(long_served: Served) -> Iterator[NodeWatch]:
    with NodeWatch(long_served.members_endpoint()) as watch:
        yield watch


def decode_steps(watch: NodeWatch) -> int:
    return watch.views()["decode-0"].steps_done


def logged_end(served: Served, client_id: str) -> tuple[int, int, str]:
    """Status, generated tokens and outcome of a request, as the access log says when it is over."""
    pattern = rf"infer (\d+) \[.*client_id={client_id} .*outcome=(\w+) .*completion_tokens=(\d+)"
    wait_until(lambda: re.search(pattern, served.log()) is not None, f"{client_id} is over")
    found = re.search(pattern, served.log())
    assert found is not None
    return int(found[1]), int(found[3]), found[2]


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "stream"])
def test_client_leaves(long_served: Served, watch: NodeWatch, streamed: bool, how: str) -> None:
    watch.wait_idle(*NODES)
    before = decode_steps(watch)
    client_id = f"leaver-{streamed}-{how}"
    prompt = random_prompt(3, 100, VOCAB_SIZE)
    with RawRequest(long_served, prompt, streamed=streamed, max_new_tokens=LONG, id=client_id) as request:
        if streamed:
            assert request.status() == 200
            request.events(3)
        wait_until(lambda: watch.views()["decode-0"].load.running_requests == 1, "it is decoded")
        if how == "reset":
            request.reset()
    status, completed, outcome = logged_end(long_served, client_id)
    assert (status, outcome) == (499, "cancelled")
    assert 0 < completed < LONG
    watch.wait_idle(*NODES)
    assert decode_steps(watch) - before < LONG


def test_client_leaves_before_its_body_is_whole(long_served: Served, watch: NodeWatch) -> None:
    failed = long_served.metrics()["request_failed_total"]
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", long_served.port)) as client:
        client.sendall(head + b'{"inputs"')
    wait_until(lambda: long_served.metrics()["request_failed_total"] == failed + 1, "the one that left is counted")
    watch.wait_idle(*NODES)


def test_deadline_passes(long_served: Served, watch: NodeWatch) -> None:
    watch.wait_idle(*NODES)
    before = decode_steps(watch)
    with long_served.client() as http:
        answer = http.post(
            "/v2/models/m/infer",
            json={
                "inputs": [{"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [1, 2, 3]}],
                "outputs": [{"name": "output0"}],
                "parameters": {"max_new_tokens": LONG, "timeout": 1},
            },
        )
    assert answer.status_code == 408
    assert answer.json()["error_type"] == "Request Timeout"
    watch.wait_idle(*NODES)
    assert decode_steps(watch) - before < LONG


def test_deadline_passes_in_a_stream(long_served: Served, watch: NodeWatch) -> None:
    for timeout in (1, 5, 25):  # the least in which this machine, as busy as it is, makes a first token
        with RawRequest(long_served, [1, 2, 3], streamed=True, max_new_tokens=LONG, timeout=timeout) as request:
            status = request.status()
            if status == 200:
                events = request.events()
                break
            assert status == 408
    assert status == 200
    assert 0 < len(tokens_of(events)) < LONG
    assert events[-1]["finish_reason"] == "timeout"
    assert events[-1]["error_type"] == "Request Timeout"
    watch.wait_idle(*NODES)


def test_more_than_the_queue_holds(long_served: Served, watch: NodeWatch) -> None:
    """What is too much is refused before any work; what was taken is served."""
    bodies = [body_of(random_prompt(number, 1500, VOCAB_SIZE), max_new_tokens=3) for number in range(40)]

    async def ask_all() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(
            base_url=long_served.url, timeout=PATIENCE_S, limits=limits, trust_env=False
        ) as http:
            return await asyncio.gather(*(http.post("/v2/models/m/infer", content=body) for body in bodies))

    answers = asyncio.run(ask_all())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in refused:
        assert answer.json()["error_type"] == "Too Many Requests"
        assert int(answer.headers["retry-after"]) > 0
    assert len(answers) - len(refused) >= 4
    watch.wait_idle(*NODES)
