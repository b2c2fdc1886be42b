"""`python -m tests.simulation.torture`: schedules of faults on all cores, as many or as long as asked.

Stopped (Ctrl-C) and started again it goes on where it was, as long as the code is the same; `--fresh` begins anew. A
seed that fails is kept with its replay command, the others go on, and at the end one failure of each kind is shrunk.
One page about all of it is printed and put beside the state file. Exit code 1 when a schedule failed.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tqdm import tqdm

from kvferry.ops.cli.numbers import above_zero, positive
from tests.simulation.__main__ import say, show_shrunk
from tests.simulation.draw import draw_schedule
from tests.simulation.ledger import Failed, Ledger, Tally, code_version, open_ledger
from tests.simulation.profiles import PROFILES
from tests.simulation.run import Run
from tests.simulation.torture_page import page
from tests.simulation.trial import attempt, ease_collector, profile_of, try_schedule

CHUNK = 10
"""Seeds that one process does before it tells of them."""
SAVE_EVERY_S = 2.0
MOST_FAILED = 100
"""After so many failures nothing new is begun."""
SHRINK_AT_MOST = 3
"""Kinds of failures that are shrunk at the end."""

Range = tuple[int, int]
Pending = set["Future[tuple[int, int, Tally]]"]


def do_range(choice: str, first: int, end: int) -> tuple[int, int, Tally]:
    """Try these seeds; runs in a process of its own."""
    tally, began = Tally(), time.process_time()
    for seed in range(first, end):
        name = profile_of(choice, seed)
        run = Run(draw_schedule(seed, name))
        failure = attempt(run)
        failed = [] if failure is None else [Failed(seed, name, failure.kind, failure.text)]
        faults, messages = dict(run.faults.total()), dict(run.monitor.counts)
        tally.add(Tally(1, 0.0, {name: 1}, faults, dict(run.counts), messages, failed))
    tally.cpu_s = time.process_time() - began
    return first, end, tally


@dataclass(slots=True)
class Torture:
    """One run of it."""

    ledger: Ledger
    path: Path
    until: int | None
    ends_at: float
    """Monotonic seconds."""
    jobs: int
    stopping: bool = False

    def run(self, bar: "tqdm[NoReturn]") -> None:
        """Go on until all is done, time is over, or somebody wants it to stop. Raises BrokenProcessPool."""
        chunks = self.ledger.left(self.until, CHUNK)
        pending: set[Future[tuple[int, int, Tally]]] = set()
        # The processes inherit that Ctrl-C is not for them: what they have begun they bring to an end.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with ProcessPoolExecutor(self.jobs, get_context("spawn"), ease_collector) as pool:
                self._submit(pool, pending, chunks)
                for number in before:
                    signal.signal(number, self._stop)
                self._loop(pool, pending, chunks, bar)
        finally:
            self.ledger.save(self.path)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _loop(
        self, pool: ProcessPoolExecutor, pending: Pending, chunks: Iterator[Range], bar: "tqdm[NoReturn]"
    ) -> None:
        wall_s, began = self.ledger.wall_s, time.monotonic()
        saved = began
        while self._submit(pool, pending, chunks):
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                pending.remove(future)
                self._note(future, bar)
            self.ledger.wall_s = wall_s + time.monotonic() - began
            if time.monotonic() - saved > SAVE_EVERY_S:
                saved = time.monotonic()
                self.ledger.save(self.path)

    def _submit(self, pool: ProcessPoolExecutor, pending: Pending, chunks: Iterator[Range]) -> bool:
        """Keep every process busy; False when nothing is left to wait for."""
        while len(pending) <= self.jobs and self._goes_on:
            chunk = next(chunks, None)
            if chunk is None:
                break
            pending.add(pool.submit(do_range, self.ledger.profile, *chunk))
        return bool(pending)

    @property
    def _goes_on(self) -> bool:
        hopeless = len(self.ledger.tally.failed) >= MOST_FAILED
        return not self.stopping and not hopeless and time.monotonic() < self.ends_at

    def _note(self, future: "Future[tuple[int, int, Tally]]", bar: "tqdm[NoReturn]") -> None:
        first, end, tally = future.result()
        self.ledger.note(first, end, tally)
        bar.update(end - first)
        for failed in tally.failed:
            bar.write(f"seed {failed.seed} ({failed.profile}): {failed.text}\nreplay: {failed.replay}")

    def _stop(self, _: int, __: FrameType | None) -> None:
        """The first time what is under way is waited for."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.torture", description=__doc__)
    parser.add_argument("--seeds", type=positive, help="in all runs together (10,000 without --minutes)")
    parser.add_argument("--minutes", type=above_zero, help="this run ends then")
    parser.add_argument("--profile", default="each", choices=[*PROFILES, "each"], help="(each: one of all a seed)")
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)), help="processes (all cores)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    parser.add_argument("--out", type=Path, default=Path("build/torture"))
    arguments = parser.parse_args(argv)
    if arguments.seeds is None and arguments.minutes is None:
        arguments.seeds = 10_000
    return arguments


def main(argv: list[str]) -> int:
    """See the module's docstring."""
    arguments = parse(argv)
    path: Path = arguments.out / f"{arguments.profile}.json"
    opened = open_ledger(path, code_version(), arguments.profile, fresh=arguments.fresh)
    ledger, before = opened.ledger, opened.ledger.tally.schedules
    say(opened.story)
    ends_at = float("inf") if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    torture = Torture(ledger, path, arguments.seeds, ends_at, max(1, arguments.jobs))
    broken = ""
    try:
        with tqdm(total=arguments.seeds, initial=before, unit="schedule", mininterval=1.0) as bar:
            torture.run(bar)
    except BrokenProcessPool:
        broken = "a process was killed from outside; start it again, it goes on"
    except KeyboardInterrupt:
        broken = "stopped at once"
    text = page(ledger, shlex.join(["python", "-m", "tests.simulation.torture", *argv]))
    (arguments.out / f"{arguments.profile}.md").write_text(text)
    say(text)
    if broken or torture.stopping:
        say(broken or "stopped; start it again, it goes on")
    elif ledger.tally.failed:
        shrink_some(ledger.tally.failed, arguments.out)
    return 1 if broken or torture.stopping or ledger.tally.failed else 0


def shrink_some(failed: list[Failed], out: Path) -> None:
    """The first failure of each kind, as short as it can be."""
    for one in list({one.kind: one for one in reversed(failed)}.values())[-SHRINK_AT_MOST:]:
        plan = draw_schedule(one.seed, one.profile)
        failure = try_schedule(plan)
        if failure is not None:
            say(f"seed {one.seed} ({one.profile}): {failure.text}")
            show_shrunk(plan, failure, out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
