"""200 clients immediately against real processes: each request ends once and whole, and nothing is left anywhere."""

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Reference
from tests.support.bodies import body_of
from tests.support.cluster import tokens_of
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.node_watch import NodeWatch
from tests.support.serve import Served, wait_until
from tests.support.tiny_llama import random_prompt

pytestmark = pytest.mark.e2e
REQUESTS = 200
CHECKED_AGAINST_REFERENCE = 12
DEADLINE_S = 180.0


@dataclass(frozen=True)
class Ask:
    """One client."""

    prompt: list[int]
    parameters: dict[str, Any]
    streamed: bool
    leaves_after_s: float | None


@dataclass
class Answer:
    """What a client got: all ids, or None when it left."""

    ids: list[int] | None
    ends: int = 1


def fill() -> list[Ask]:
    """Mixed lengths, priorities, sampling and streaming; a tenth leaves. Half of the prompts begin alike."""
    rng = random.Random(11)
    shared = random_prompt(1, 96, VOCAB_SIZE)
    asks = []
    for number in range(REQUESTS):
        prompt = random_prompt(number, rng.choice([1, 9, 60, 250]), VOCAB_SIZE)
        prompt = shared + prompt if rng.random() < 0.5 else prompt
        parameters: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 8, 30]), "priority": rng.randint(1, 5)}
        if rng.random() < 0.4:
            parameters |= {"do_sample": True, "seed": number + 1, "temperature": 0.9, "top_p": 0.95}
        leaves = rng.random() * 2.0 if number % 10 == 7 else None
        asks.append(Ask(prompt, parameters, rng.random() < 0.5, leaves))
    return asks


async def answer_of(client: httpx.AsyncClient, ask: Ask) -> Answer:
    """Send it and take in the whole answer."""
    body = body_of(ask.prompt, **ask.parameters)
    if not ask.streamed:
        answer = await client.post("/v2/models/m/infer", content=body)
        assert answer.status_code == 200, answer.text
        return Answer(answer.json()["outputs"][0]["data"])
    async with client.stream("POST", "/v2/models/m/infer_stream", content=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        events = [json.loads(line.removeprefix("data: ")) async for line in answer.aiter_lines() if line]
    return Answer(tokens_of(events), sum("finish_reason" in event for event in events))


async def run_one(client: httpx.AsyncClient, ask: Ask) -> Answer:
    try:
        async with asyncio.timeout(ask.leaves_after_s):
            return await answer_of(client, ask)
    except TimeoutError:
        return Answer(None)


async def run_all(url: str, asks: list[Ask]) -> list[Answer]:
    limits = httpx.Limits(max_connections=REQUESTS)
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, limits=limits, trust_env=False) as client,
    ):
        return await asyncio.gather(*(run_one(client, ask) for ask in asks))


def warm_up(served: Served, asks: list[Ask]) -> None:
    """Every worker has done everything once: what is opened at first use is no leak."""
    for worker in served.workers():
        with served.only_worker(worker):
            asyncio.run(run_all(served.url, asks))
            served.metrics()


def descriptors(served: Served) -> dict[int, int]:
    """Open descriptors of every process of the cluster."""
    return {process.pid: process.num_fds() for process in served.processes()}


def more_descriptors(served: Served, before: dict[int, int]) -> dict[str, list[str]]:
    """The descriptors of the processes that have more than before, by command line."""
    grown = [process for process in served.processes() if process.num_fds() > before[process.pid]]
    return {" ".join(process.cmdline()): list(open_files(process.pid)) for process in grown}


def open_files(pid: int) -> Iterator[str]:
    """What the descriptors of a process lead to. One may be closed while it is looked at."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield str(path.readlink())


@pytest.mark.slow
def test_200_immediately(served: Served, watch: NodeWatch, reference: Reference) -> None:
    asks = fill()
    warm_up(served, [Ask(ask.prompt, ask.parameters, ask.streamed, None) for ask in asks[:24]])
    watch.wait_idle("prefill-0", "decode-0")
    before = descriptors(served)
    counts = served.metrics()

    answers = asyncio.run(run_all(served.url, asks))

    left = sum(answer.ids is None for answer in answers)
    assert left > 0
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ends == 1
        if answer.ids is not None:
            assert len(answer.ids) == ask.parameters["max_new_tokens"]
        else:
            assert ask.leaves_after_s is not None
    greedy = [pair for pair in zip(asks, answers, strict=True) if "seed" not in pair[0].parameters and pair[1].ids]
    for ask, answer in greedy[:CHECKED_AGAINST_REFERENCE]:
        assert answer.ids == reference.tokens(ask.prompt, ask.parameters["max_new_tokens"])

    watch.wait_idle("prefill-0", "decode-0")
    wait_until(lambda: served.metrics()["npu_cache_usage_perc"] == 0.0, "no block is held")

    def counted() -> tuple[float, float, float]:
        """Received, served and failed since then."""
        after = served.metrics()
        received, success, failure = (
            after[f"request_{name}_total"] - counts[f"request_{name}_total"]
            for name in ("received", "success", "failed")
        )
        return received, success, failure

    # A request is counted as ended after its answer's last byte, or when the worker sees that its client has left.
    wait_until(lambda: (now := counted())[0] == now[1] + now[2], "every request has ended")
    _, success, failure = counted()
    # Who leaves before a worker takes the connection, or just as the answer is complete, is no failure.
    assert failure <= left
    assert success >= REQUESTS - left
    after = served.metrics()
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    try:
        wait_until(lambda: not more_descriptors(served, before), "descriptors are closed")
    except AssertionError as error:
        raise AssertionError(f"{error}: {before} {more_descriptors(served, before)}") from None
    assert {process.pid for process in served.processes()} == set(before)
