"""`python -m tests.chaos.storm`: nine of ten clients leave or time out under overload; is the throughput back in 5 s?

A steady load measures the level before; the storm adds many clients with long prompts and outputs on top of it, then
only the steady load is left.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.ops.cli.numbers import above_zero, positive
from tests.chaos.client import End, Record
from tests.chaos.client_requests import ClientRequest, Sizes, patient, pool
from tests.chaos.links import PlainLinks
from tests.chaos.load import Client, Target, learn, now
from tests.chaos.testbed import VOCAB_SIZE, Shape, Testbed, running_testbed, tiny_model

BACK_S, BACK_SHARE = 5.0, 0.8
_SHORT = Sizes(prompts=(1, 9, 60), outputs=(8, 16), shared=16, vocab_size=VOCAB_SIZE)
_LONG = Sizes(prompts=(900, 1500, 1900), outputs=(300, 500), shared=8, vocab_size=VOCAB_SIZE)


@dataclass
class Storm:
    """Steady answers (times) and how the storm's requests ended."""

    steady: list[float]
    began: float
    ended: float
    until: float
    ends: Counter[End]
    wrong: list[str]

    def level(self, since: float, until: float) -> float:
        """Steady answers a second."""
        return sum(since <= at < until for at in self.steady) / max(1e-9, until - since)

    def back_after_s(self, start: float) -> float | None:
        """When, after the storm, a whole window of 3 s has the level before again."""
        before = self.level(start, self.began)
        at = self.ended
        while at + 3.0 <= self.until:
            if self.level(at, at + 3.0) >= BACK_SHARE * before:
                return at - self.ended
            at += 0.1
        return None


async def run_storm(testbed: Testbed, steady_clients: int, storm_clients: int, quiet_s: float, storm_s: float) -> str:
    """Run it; the page's text, which begins with OK or WRONG."""
    steady = Target(testbed.served.port, testbed.served.model, pool(5, 24, _SHORT))
    steady.expected_ids = await learn(steady)
    stormy = Target(testbed.served.port, testbed.served.model, pool(6, 24, _LONG))
    storm = Storm([], 0.0, 0.0, 0.0, Counter(), [])
    stop, calm = asyncio.Event(), asyncio.Event()

    async def steadily(number: int) -> None:
        rng, client = random.Random(f"steady-{number}"), Client(steady)
        while not stop.is_set():
            record = await client.ask(patient(rng.randrange(24), streamed=rng.random() < 0.5))
            _note(record, storm.wrong)
            if record.end is End.COMPLETE:
                storm.steady.append(record.ended)
            else:
                await asyncio.sleep(0.1)
        client.leave()

    async def stormily(number: int) -> None:
        rng, client = random.Random(f"storm-{number}"), Client(stormy)
        while not calm.is_set():
            record = await client.ask(_stormy(rng))
            _note(record, storm.wrong)
            storm.ends[record.end] += 1
            await asyncio.sleep(0.05)
        client.leave()

    start = now()
    steadies = [asyncio.ensure_future(steadily(number)) for number in range(steady_clients)]
    await asyncio.sleep(quiet_s)
    storm.began = now()
    storms = [asyncio.ensure_future(stormily(number)) for number in range(storm_clients)]
    await asyncio.sleep(storm_s)
    calm.set()
    # Those who left are gone now; the one of ten who waits has his answer first.
    await asyncio.gather(*storms)
    storm.ended = now()
    await asyncio.sleep(BACK_S + 8.0)
    storm.until = now()
    stop.set()
    await asyncio.gather(*steadies)
    await asyncio.to_thread(testbed.wait_whole)
    return _page(storm, start, steady_clients, storm_clients)


def _stormy(rng: random.Random) -> ClientRequest:
    stays, times_out = rng.random() < 0.1, rng.random() < 0.5
    leaves = None if stays or times_out else rng.random() * 0.8
    return ClientRequest(
        rng.randrange(24), rng.randint(1, 5), rng.random() < 0.5, leaves, 1 if not stays and times_out else None
    )


def _note(record: Record, wrong: list[str]) -> None:
    if record.wrong or record.end is End.LOST:
        wrong.append(f"{record.end.value}: {record.wrong}")


def _page(storm: Storm, start: float, steady: int, stormy: int) -> str:
    warm = start + (storm.began - start) * 0.3
    back = storm.back_after_s(warm)
    fine = back is not None and back <= BACK_S and not storm.wrong
    seconds: Sequence[float] = [storm.level(storm.ended + n, storm.ended + n + 1) for n in range(int(BACK_S) + 3)]
    ends = ", ".join(f"{count} {end.value}" for end, count in storm.ends.most_common())
    return "\n".join(
        [
            f"# Abort storm: {'OK' if fine else 'WRONG'}",
            "",
            f"{steady} steady clients: {storm.level(warm, storm.began):.1f} answers a second before, "
            f"{storm.level(storm.began, storm.ended):.1f} during {storm.ended - storm.began:.0f} s of {stormy} more.",
            f"At {BACK_SHARE:.0%} of the level before (window of 3 s) after: "
            + ("never" if back is None else f"{back:.1f} s; {BACK_S:.0f} s are allowed."),
            "Answers in the seconds after: " + ", ".join(f"{value:.0f}" for value in seconds),
            f"The storm's requests: {ends}.",
            *(f"- {text}" for text in storm.wrong[:20]),
            "",
        ]
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.storm", description=__doc__)
    parser.add_argument("--steady", type=positive, default=16)
    parser.add_argument("--clients", type=positive, default=200)
    parser.add_argument("--quiet-s", type=above_zero, default=12.0)
    parser.add_argument("--storm-s", type=above_zero, default=12.0)
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvf-storm-") as name:
        shape = Shape(tiny_model(Path(name) / "m"), settings={"log.access_log": "false"})
        with running_testbed(shape, Path(name), PlainLinks) as testbed:
            text = asyncio.run(run_storm(testbed, args.steady, args.clients, args.quiet_s, args.storm_s))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "storm.md").write_text(text)
    sys.stdout.write(text)
    return 0 if "OK" in text.splitlines()[0] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
