"""A crowd of clients, each asking one request after another on a connection of its own, until it is told to stop."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.chaos import asks
from tests.chaos.asks import Ask, Generation
from tests.chaos.client import End, Record, ask_once, judge
from tests.chaos.http import Connection

_AGAIN_S = 0.25
"""A refused client's pause; it does not wait the whole Retry-After, for that is what a crowd does."""


@dataclass
class Target:
    """Whom the clients ask, and for what."""

    port: int
    model: str
    generations: Sequence[Generation]
    truths: list[list[int]] = field(default_factory=list)


class Client:
    """One client with at most one connection."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection: Connection | None = None

    async def ask(self, ask: Ask) -> Record:
        """Ask it, and judge the answer if the truth is known."""
        target = self._target
        if self._connection is None or not self._connection.can_go_on:
            self.leave()
            self._connection = await Connection.open(target.port)
        record = await ask_once(self._connection, target.model, target.generations, ask)
        if target.truths:
            judge(record, target.generations[ask.number], target.truths[ask.number])
        return record

    def leave(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None


async def learn(target: Target, clients: int = 8) -> list[list[int]]:
    """What every generation gives on a quiet cluster, asked streamed and unary, which must be the same."""
    numbers = iter(range(len(target.generations)))
    truths: list[list[int]] = [[] for _ in target.generations]

    async def run() -> None:
        client = Client(target)
        for number in numbers:
            records = [await client.ask(asks.patient(number, streamed=streamed)) for streamed in (True, False)]
            for record in records:
                assert record.end is End.COMPLETE, record
            assert records[0].ids == records[1].ids, records
            truths[number] = records[0].ids
        client.leave()

    await asyncio.gather(*(run() for _ in range(clients)))
    return truths


class Crowd:
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
        """Nobody begins another request."""
        self._stopping = True

    async def _client(self, number: int, on_record: Callable[[Record], None]) -> None:
        rng = random.Random(f"client-{self._seed}-{number}")
        client = Client(self._target)
        while not self._stopping:
            await asyncio.sleep(rng.expovariate(1 / self._think_s))
            record = await client.ask(asks.draw(rng, len(self._target.generations)))
            self.records.append(record)
            on_record(record)
            if record.end in (End.REFUSED, End.LOST, End.IDLE_CLOSED):
                await asyncio.sleep(_AGAIN_S)
        client.leave()


def now() -> float:
    """The clock of all records."""
    return time.monotonic()
