"""The load: random prompts, sent in a closed loop (fixed concurrency) or an open loop (Poisson arrivals).

An open loop does not wait for a slow server, and a request's times start when it was due: waiting is not hidden.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.ops.bench.serve.request import Requester, RequestOutcome

OnEnd = Callable[[RequestOutcome], object]


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """Number, sizes and arrivals of the requests."""

    requests: int
    input_len: int
    output_len: int
    concurrency: int | None
    """Concurrent requests of a closed loop; None: an open loop with `rate`."""
    rate: float | None
    """Requests per second of an open loop, with exponentially distributed pauses."""
    seed: int
    vocab_size: int


def prompts(load: RequestLoad, count: int, salt: str) -> list[list[int]]:
    """Random token ids, reproducible by seed and salt. Prompts have no common prefix that a server could cache."""
    source = random.Random(f"{load.seed} {salt}")
    return [[source.randrange(load.vocab_size) for _ in range(load.input_len)] for _ in range(count)]


def arrival_times(load: RequestLoad, count: int) -> list[float]:
    """Times at which the requests of an open loop are due, in seconds from the start."""
    assert load.rate is not None
    source = random.Random(f"{load.seed} arrivals")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += source.expovariate(load.rate)
    return times


async def run_load(
    requester: Requester, load: RequestLoad, bodies: Sequence[bytes], on_end: OnEnd
) -> list[RequestOutcome]:
    """Send all bodies; returns the outcomes in the order in which the requests ended."""
    outcomes: list[RequestOutcome] = []

    def ended(outcome: RequestOutcome) -> None:
        outcomes.append(outcome)
        on_end(outcome)

    if load.concurrency is not None:
        await _closed(requester, load.concurrency, bodies, ended)
    else:
        await _open(requester, arrival_times(load, len(bodies)), bodies, ended)
    return outcomes


async def _closed(requester: Requester, concurrency: int, bodies: Sequence[bytes], ended: OnEnd) -> None:
    clock = asyncio.get_running_loop().time
    waiting = iter(bodies)

    async def client() -> None:
        for body in waiting:
            ended(await requester.send(body, clock()))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(bodies))):
            group.create_task(client())


async def _open(requester: Requester, times: Sequence[float], bodies: Sequence[bytes], ended: OnEnd) -> None:
    clock = asyncio.get_running_loop().time
    start = clock()

    async def client(due: float, body: bytes) -> None:
        await asyncio.sleep(max(0.0, due - clock()))
        ended(await requester.send(body, due))

    async with asyncio.TaskGroup() as group:
        for offset, body in zip(times, bodies, strict=True):
            group.create_task(client(start + offset, body))
