"""`python -m tests.chaos.soak`: a great many short requests, and whether memory and descriptors stay flat meanwhile.

Stopped and started again it continues counting where it was (`soak.json` next to the report); flatness is judged within
each run, for a new run has new processes.
"""

import argparse
import asyncio
import contextlib
import random
import shlex
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

import msgspec
from tqdm import tqdm

from kvferry.ops.cli.numbers import positive
from tests.chaos.client import End, Record
from tests.chaos.client_requests import REAL_SIZES, ClientRequest, Generation, Sizes, pool
from tests.chaos.links import PlainLinks
from tests.chaos.load import Client, Target, learn, now
from tests.chaos.plot import plot_samples
from tests.chaos.recovery import percentile
from tests.chaos.sampler import Sample, Sampler, look
from tests.chaos.soak_report import Grown, Run, State, page
from tests.chaos.testbed import (
    REAL_SETTINGS,
    VOCAB_SIZE,
    Shape,
    Testbed,
    fill_in,
    on_every_worker,
    running_testbed,
    tiny_model,
)
from tests.support.real_model import real_model_path

_SIZES = Sizes(prompts=(1, 3, 8), outputs=(1, 2, 3), shared=8, vocab_size=VOCAB_SIZE)
_WARM_SHARE, _TAIL_SHARE = 0.2, 0.2
_LEAVE_SHARE = 0.02
_TINY = {"requests": 100_000, "clients": 32}
_REAL = {"requests": 500, "clients": 8}


def growth(samples: list[Sample], before: list[Sample], after: list[Sample]) -> list[Grown]:
    """Of every process that was there after warming up and at the end."""
    first, last = samples[0].at, samples[-1].at
    found = []
    for name, pid in dict.fromkeys((sample.name, sample.pid) for sample in samples):
        own = [sample for sample in samples if sample.pid == pid]
        warm = [s for s in own if 0 <= (s.at - first) / max(1e-9, last - first) - _WARM_SHARE <= _WARM_SHARE]
        tail = [s for s in own if (last - s.at) / max(1e-9, last - first) <= _TAIL_SHARE]
        if warm and tail:
            rss = [int(percentile([s.rss for s in part], 0.5)) for part in (warm, tail)]
            descriptors = [max((s.descriptors for s in part if s.pid == pid), default=0) for part in (before, after)]
            found.append(Grown(name, pid, *rss, *descriptors))
    return found


async def _client(number: int, target: Target, left: list[int], tally: "_Tally") -> None:
    rng = random.Random(f"soak-{number}")
    client = Client(target)
    while left[0] > 0:
        left[0] -= 1
        leaves = rng.random() * 0.05 if rng.random() < _LEAVE_SHARE else None
        ask = ClientRequest(rng.randrange(len(target.generations)), rng.randint(1, 5), rng.random() < 0.3, leaves)
        tally.add(await client.ask(ask))
    client.leave()


class _Tally:
    def __init__(self, bar: "tqdm[NoReturn]") -> None:
        self.run = Run(0, 0.0, {}, [], [])
        self._bar = bar

    def add(self, record: Record) -> None:
        run = self.run
        run.requests += 1
        run.ends[record.end.value] = run.ends.get(record.end.value, 0) + 1
        if record.wrong or record.end in (End.LOST, End.REFUSED, End.TIMEOUT):
            run.wrong.append(f"{record.end.value}: {record.wrong or record.note}"[:300])
        self._bar.update(1)


async def soak(
    testbed: Testbed, generations: tuple[Generation, ...], count: int, clients: int
) -> tuple[Run, list[Sample]]:
    """One run, and what its processes took over time."""
    target = Target(testbed.served.port, testbed.served.model, generations)
    target.expected_ids = await learn(target)
    await on_every_worker(testbed, lambda: learn(target))
    await asyncio.to_thread(testbed.wait_whole)
    before = look(testbed.served)
    with tqdm(total=count, unit="request", mininterval=2.0) as bar, Sampler(testbed.served) as sampler:
        tally, began, left = _Tally(bar), now(), [count]
        # Ctrl-C: what was done counts, and the next run continues.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*(_client(number, target, left, tally) for number in range(clients)))
        tally.run.seconds = now() - began
    try:
        await asyncio.to_thread(testbed.wait_whole)
    except AssertionError as error:
        tally.run.wrong.append(f"not whole afterwards: {error}"[:300])
    tally.run.processes = growth(sampler.samples, before, look(testbed.served))
    return tally.run, sampler.samples


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--real", action="store_true", help="the small real model, and fewer requests")
    parser.add_argument("--requests", type=positive, help="in all runs together (100,000; real 500)")
    parser.add_argument("--this-run", type=positive, default=1 << 60, help="no more than so many in this run")
    parser.add_argument("--clients", type=positive, help="(32; real 8)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    args = parser.parse_args(argv)
    return fill_in(args, _REAL if args.real else _TINY)


def main(argv: list[str]) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    name = "soak-real" if args.real else "soak"
    file: Path = args.out / f"{name}.json"
    state = State() if args.fresh or not file.exists() else msgspec.json.decode(file.read_bytes(), type=State)
    count = min(args.requests - state.requests, args.this_run)
    picture = args.out / f"{name}.png"
    if count > 0:
        with (
            tempfile.TemporaryDirectory(prefix="kvf-soak-") as directory,
            _stand(args.real, Path(directory)) as testbed,
        ):
            generations = pool(1, 16 if args.real else 64, REAL_SIZES if args.real else _SIZES)
            run, samples = asyncio.run(soak(testbed, generations, count, args.clients))
            state.runs.append(run)
            # Before the cluster is stopped and checked: whatever goes wrong then, the run was one.
            file.write_bytes(msgspec.json.encode(state))
            plot_samples(samples, picture)
    text = page(state, shlex.join(["python", "-m", "tests.chaos.soak", *argv]), picture.name)
    (args.out / f"{name}.md").write_text(text)
    sys.stdout.write(text)
    return 0 if state.is_clean else 1


def _stand(real: bool, directory: Path) -> AbstractContextManager[Testbed]:
    model = real_model_path() if real else tiny_model(directory / "m")
    own = REAL_SETTINGS if real else {}
    return running_testbed(Shape(model, 1, 1, settings={**own, "log.access_log": "false"}), directory, PlainLinks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
