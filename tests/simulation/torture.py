"""Run fault schedules on all cores, as many or as long as asked: `python -m tests.simulation.torture`.

Stopped with Ctrl-C and started again it continues, as long as the code is the same; `--fresh` begins a new count. A
seed that fails is kept with its replay command, and at the end the first failure of each kind is shrunk. The report is
printed and written to the folder of the state file. Exit code 1 when a schedule failed.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from kvferry.ops.cli.numbers import above_zero, positive
from tests.simulation.__main__ import say, show_shrunk
from tests.simulation.draw import draw_plan
from tests.simulation.ledger import Failed, Ledger, Tally
from tests.simulation.profiles import PROFILES
from tests.simulation.run import Run
from tests.simulation.trial import attempt, ease_collector, profile_of, try_plan

CHUNK = 10
"""Seeds of one task of a process."""
SAVE_EVERY_S = 2.0
MOST_FAILED = 100
"""No schedule is started after so many failures."""
MOST_SHRUNK = 3
"""Kinds of failures that are shrunk at the end."""


def run_seeds(choice: str, first: int, end: int) -> Tally:
    """Run these seeds; in a process of the pool."""
    tally, began = Tally(), time.process_time()
    for seed in range(first, end):
        name = profile_of(choice, seed)
        run = Run(draw_plan(seed, name))
        failure = attempt(run)
        if failure is not None:
            tally.failed.append(Failed(seed, name, failure.kind, failure.text))
        tally.count("profile", {name: 1})
        tally.count("fault", run.faults.total())
        tally.count("end of requests", run.counts)
        tally.count("message", run.monitor.counts)
    tally.cpu_s = time.process_time() - began
    return tally


def prepare_process() -> None:
    """Set up a process of the pool. Ctrl-C reaches it too, and must not end a started schedule."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ease_collector()


@dataclass(slots=True)
class Torture:
    """One run of it."""

    ledger: Ledger
    path: Path
    until: int | None
    """Seeds in all runs together."""
    ends_at: float
    """Monotonic seconds."""
    jobs: int
    stopped: bool = False
    _handlers: dict[int, object] = field(default_factory=dict)

    def run(self, bar: "tqdm[NoReturn]") -> None:
        """Run until all seeds are done, the time is over, or a signal stops it. Raises BrokenProcessPool."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._stop)
        try:
            with ProcessPoolExecutor(self.jobs, get_context("spawn"), prepare_process) as pool:
                self._run(pool, bar)
        finally:
            self.ledger.save(self.path)
            self._restore_handlers()

    def _run(self, pool: ProcessPoolExecutor, bar: "tqdm[NoReturn]") -> None:
        pending: deque[tuple[int, Future[Tally]]] = deque()
        at, saved_at = self.ledger.next_seed, 0.0
        wall_s, began = self.ledger.wall_s, time.monotonic()
        while True:
            while len(pending) < 2 * self.jobs and self._may_start(at):
                first, at = at, at + CHUNK if self.until is None else min(at + CHUNK, self.until)
                pending.append((at, pool.submit(run_seeds, self.ledger.profile, first, at)))
            if not pending:
                return
            end, future = pending.popleft()
            tally = future.result()
            for failed in tally.failed:
                bar.write(f"seed {failed.seed} ({failed.profile}): {failed.text}\nreplay: {failed.replay}")
            bar.update(end - self.ledger.next_seed)
            self.ledger.next_seed = end
            self.ledger.tally.add(tally)
            self.ledger.wall_s = wall_s + time.monotonic() - began
            if time.monotonic() - saved_at > SAVE_EVERY_S:
                saved_at = time.monotonic()
                self.ledger.save(self.path)

    def _may_start(self, seed: int) -> bool:
        over = self.until is not None and seed >= self.until
        hopeless = len(self.ledger.tally.failed) >= MOST_FAILED
        return not (over or hopeless or self.stopped or time.monotonic() >= self.ends_at)

    def _stop(self, *_: object) -> None:
        """Wait for the schedules in progress. A second signal ends the process."""
        self.stopped = True
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())  # type: ignore[arg-type]


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.torture", description=__doc__)
    parser.add_argument("--seeds", type=positive, help="in all runs together (10,000 without --minutes)")
    parser.add_argument("--minutes", type=above_zero, help="this run ends then")
    parser.add_argument("--profile", default="each", choices=[*PROFILES, "each"], help="(each: another for each seed)")
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)), help="processes (all cores)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    parser.add_argument("--out", type=Path, default=Path("build/torture"))
    arguments = parser.parse_args(argv)
    if arguments.seeds is None and arguments.minutes is None:
        arguments.seeds = 10_000
    return arguments


def main(argv: list[str]) -> int:
    """See the module docstring."""
    arguments = parse(argv)
    path: Path = arguments.out / f"{arguments.profile}.json"
    ledger = Ledger.open(path, arguments.profile, fresh=arguments.fresh)
    say(f"code {ledger.code}: {f'continues at seed {ledger.next_seed}' if ledger.next_seed else 'a new count'}")
    ends_at = float("inf") if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    torture = Torture(ledger, path, arguments.seeds, ends_at, arguments.jobs)
    try:
        with tqdm(total=arguments.seeds, initial=ledger.next_seed, unit="schedule", mininterval=1.0) as bar:
            torture.run(bar)
    except BrokenProcessPool:
        torture.stopped = True
        say("a process of the pool was killed")
    text = ledger.report(shlex.join(["python", "-m", "tests.simulation.torture", *argv]))
    path.with_suffix(".md").write_text(text)
    say(text)
    if torture.stopped:
        say("stopped; the same command continues")
    else:
        shrink_some(ledger.tally.failed, arguments.out)
    return 1 if torture.stopped or ledger.tally.failed else 0


def shrink_some(failed: list[Failed], out: Path) -> None:
    """Shrink the first failure of each kind."""
    first_of_kind = {one.kind: one for one in reversed(failed)}
    for one in list(first_of_kind.values())[-MOST_SHRUNK:]:
        schedule = draw_plan(one.seed, one.profile)
        failure = try_plan(schedule)
        if failure is not None:
            say(f"seed {one.seed} ({one.profile}): {failure.text}")
            show_shrunk(schedule, failure, out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
