"""The load: prompts from a seed, and when each is sent. Closed loop (so many at once) or Poisson arrivals (open loop).

An open loop does not wait for a slow server, and a request's times count from when it was due: waiting is not hidden.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.ops.bench.serve.request import Requester, RequestOutcome

OnEnd = Callable[[RequestOutcome], object]


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """What is asked for."""

    requests: int
    input_len: int
    output_len: int
    concurrency: int | None
    """So many at once, the next when one ends. None: `rate` holds."""
    rate: float | None
    """Requests a second, with exponentially distributed pauses."""
    seed: int
    vocab_size: int


def prompts(load: RequestLoad, count: int, salt: str) -> list[list[int]]:
    """Random ids below the vocabulary's size: the same for the same seed and salt, no two with a common beginning."""
    draw = random.Random(f"{load.seed} {salt}")
    return [[draw.randrange(load.vocab_size) for _ in range(load.input_len)] for _ in range(count)]


def arrival_times(load: RequestLoad, count: int) -> list[float]:
    """Seconds from the start at which each request of an open loop is due."""
    assert load.rate is not None
    draw = random.Random(f"{load.seed} arrivals")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(load.rate)
    return times


async def run_load(
    requester: Requester, load: RequestLoad, bodies: Sequence[bytes], on_end: OnEnd
) -> list[RequestOutcome]:
    """Send all bodies; outcomes in the order in which they ended."""
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
