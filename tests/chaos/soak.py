"""`python -m tests.chaos.soak`: a great many short requests, and whether memory and descriptors stay flat meanwhile.

Stopped and started again it goes on counting where it was (`soak.json` beside the report); flatness is judged within
each run, for a new run has new processes.
"""

import argparse
import asyncio
import contextlib
import random
import shlex
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import msgspec
from tqdm import tqdm

from tests.chaos.asks import Ask, Generation, Sizes, pool
from tests.chaos.client import End, Record
from tests.chaos.crowd import Client, Target, learn, now
from tests.chaos.links import PlainLinks
from tests.chaos.recovery import percentile
from tests.chaos.sampler import Sample, Sampler, look
from tests.chaos.stand import VOCAB_SIZE, Shape, Stand, on_every_worker, standing, tiny_model

_SIZES = Sizes(prompts=(1, 3, 8), outputs=(1, 2, 3), shared=8, vocab_size=VOCAB_SIZE)
_WARM_SHARE, _TAIL_SHARE = 0.2, 0.2
_RSS_SHARE, _RSS_BYTES = 0.03, 6 << 20
_LEAVE_SHARE = 0.02
_EVERY_S = 5.0


class Grown(msgspec.Struct, frozen=True):
    """One process in one run: memory after warming up and at the end (medians), descriptors before and after it.

    Descriptors are compared without clients: which worker has how many connections is the kernel's choice.
    """

    name: str
    pid: int
    rss_then: int
    rss_end: int
    descriptors_then: int
    descriptors_end: int

    @property
    def is_flat(self) -> bool:
        return (
            self.rss_end <= self.rss_then * (1 + _RSS_SHARE) + _RSS_BYTES
            and self.descriptors_end <= self.descriptors_then
        )


class Run(msgspec.Struct):
    """One run of the soak."""

    requests: int
    seconds: float
    ends: dict[str, int]
    wrong: list[str]
    processes: list[Grown]


class State(msgspec.Struct):
    """All runs so far."""

    runs: list[Run] = []

    @property
    def requests(self) -> int:
        return sum(run.requests for run in self.runs)


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
        ask = Ask(rng.randrange(len(target.generations)), rng.randint(1, 5), rng.random() < 0.3, leaves)
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


async def soak(stand: Stand, generations: tuple[Generation, ...], count: int, clients: int) -> Run:
    """One run."""
    target = Target(stand.served.port, stand.served.model, generations)
    target.truths = await learn(target)
    await on_every_worker(stand, lambda: learn(target))
    await asyncio.to_thread(stand.wait_whole)
    before = look(stand.served)
    with tqdm(total=count, unit="request", mininterval=2.0) as bar, Sampler(stand.served, _EVERY_S) as sampler:
        tally, began, left = _Tally(bar), now(), [count]
        # Ctrl-C: what was done counts, and the next run goes on.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*(_client(number, target, left, tally) for number in range(clients)))
        tally.run.seconds = now() - began
    try:
        await asyncio.to_thread(stand.wait_whole)
    except AssertionError as error:
        tally.run.wrong.append(f"not whole afterwards: {error}"[:300])
    tally.run.processes = growth(sampler.samples, before, look(stand.served))
    return tally.run


def page(state: State, command: str) -> str:
    """The report."""
    wrong = [text for run in state.runs for text in run.wrong]
    uneven = [grown for run in state.runs for grown in run.processes if not grown.is_flat]
    lines = [f"# Soak: {state.requests} requests, {'nothing wrong' if not wrong and not uneven else 'not clean'}", ""]
    lines += [f"`{command}`, {len(state.runs)} runs.", ""]
    for number, run in enumerate(state.runs, 1):
        ends = ", ".join(f"{count} {end}" for end, count in run.ends.items())
        lines += [f"Run {number}: {run.requests} in {run.seconds:.0f} s ({run.requests / run.seconds:.0f}/s): {ends}."]
        lines += ["", "| process | RSS MiB | at the end | descriptors | at the end | flat |", "|" + " --- |" * 6]
        for grown in run.processes:
            rss = f"{grown.rss_then / 2**20:.1f} | {grown.rss_end / 2**20:.1f}"
            descriptors = f"{grown.descriptors_then} | {grown.descriptors_end}"
            lines.append(f"| {grown.name} | {rss} | {descriptors} | {'yes' if grown.is_flat else 'NO'} |")
        lines.append("")
    return "\n".join([*lines, *(f"- {text}" for text in wrong[:20])]) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="in all runs together (100,000)")
    parser.add_argument("--this-run", type=int, default=1 << 60, help="no more than so many in this run")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    file: Path = args.out / "soak.json"
    state = State() if args.fresh or not file.exists() else msgspec.json.decode(file.read_bytes(), type=State)
    count = min(args.requests - state.requests, args.this_run)
    if count > 0:
        with tempfile.TemporaryDirectory(prefix="kvf-soak-") as name:
            shape = Shape(tiny_model(Path(name) / "m"), 1, 1, settings={"log.access_log": "false"})
            with standing(shape, Path(name), PlainLinks) as stand:
                state.runs.append(asyncio.run(soak(stand, pool(1, 64, _SIZES), count, args.clients)))
                # Before the cluster is stopped and checked: whatever goes wrong then, the run was one.
                file.write_bytes(msgspec.json.encode(state))
    text = page(state, shlex.join(["python", "-m", "tests.chaos.soak", *argv]))
    (args.out / "soak.md").write_text(text)
    sys.stdout.write(text)
    flat = all(grown.is_flat for run in state.runs for grown in run.processes)
    return 0 if flat and not any(run.wrong for run in state.runs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
