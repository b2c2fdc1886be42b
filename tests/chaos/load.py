"""Clients that send one request after another, each on a connection of its own, until they are stopped."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.chaos import client_requests
from tests.chaos.client import End, Record, judge, send_once
from tests.chaos.client_requests import ClientRequest, Generation
from tests.chaos.http import Connection

_AGAIN_S = 0.25
"""A refused client's pause; it does not wait the whole Retry-After, for that is what a load does."""


@dataclass
class Target:
    """Whom the clients ask, and for what."""

    port: int
    model: str
    generations: Sequence[Generation]
    expected_ids: list[list[int]] = field(default_factory=list)


class Client:
    """One client with at most one connection."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection: Connection | None = None

    async def ask(self, ask: ClientRequest) -> Record:
        """ClientRequest it, and judge the answer if the truth is known."""
        target = self._target
        if self._connection is None or not self._connection.can_continue:
            self.leave()
            self._connection = await Connection.open(target.port)
        record = await send_once(self._connection, target.model, target.generations, ask)
        if target.expected_ids:
            judge(record, target.generations[ask.number], target.expected_ids[ask.number])
        return record

    def leave(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None


async def learn(target: Target, clients: int = 8) -> list[list[int]]:
    """What every generation gives on a quiet cluster, asked streamed and unary, which must be the same."""
    numbers = iter(range(len(target.generations)))
    expected_ids: list[list[int]] = [[] for _ in target.generations]

    async def run() -> None:
        client = Client(target)
        for number in numbers:
            records = [
                await client.ask(client_requests.patient(number, streamed=streamed)) for streamed in (True, False)
            ]
            for record in records:
                assert record.end is End.COMPLETE, record
            assert records[0].ids == records[1].ids, records
            expected_ids[number] = records[0].ids
        client.leave()

    await asyncio.gather(*(run() for _ in range(clients)))
    return expected_ids


class ClientLoad:
    """Clients with their records."""

    def __init__(self, target: Target, seed: int, size: int, think_s: float) -> None:
        self.records: list[Record] = []
        self._target = target
        self._seed = seed
        self._size = size
        self._think_s = think_s
        self._stopping = False

    async def run(self, on_record: Callable[[Record], None] = lambda record: None) -> None:
        """Until `stop`; every request under way ends."""
        await asyncio.gather(*(self._client(number, on_record) for number in range(self._size)))

    def stop(self) -> None:
        """No client begins another request."""
        self._stopping = True

    async def _client(self, number: int, on_record: Callable[[Record], None]) -> None:
        rng = random.Random(f"client-{self._seed}-{number}")
        client = Client(self._target)
        while not self._stopping:
            await asyncio.sleep(rng.expovariate(1 / self._think_s))
            record = await client.ask(client_requests.draw(rng, len(self._target.generations)))
            self.records.append(record)
            on_record(record)
            if record.end in (End.REFUSED, End.LOST, End.IDLE_CLOSED):
                await asyncio.sleep(_AGAIN_S)
        client.leave()


def now() -> float:
    """The clock of all records."""
    return time.monotonic()
