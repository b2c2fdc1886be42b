"""Run fault schedules on all cores, as many or as long as asked: `python -m tests.simulation.torture`.

Stopped with Ctrl-C and started again it continues, as long as the code is the same; `--fresh` begins a new count. A
seed that fails is kept with its replay command, and at the end the first failure of each kind is shrunk. The report is
printed and written to the folder of the state file. Exit code 1 when a schedule failed.
"""

import argparse
import math
import os
import shlex
import signal
import sys
import time
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from kvferry.ops.cli.numbers import above_zero, positive
from tests.simulation.__main__ import say, show_shrunk
from tests.simulation.draw import draw_schedule
from tests.simulation.ledger import Failed, Ledger, Tally
from tests.simulation.profiles import PROFILES
from tests.simulation.run import Run
from tests.simulation.trial import attempt, ease_collector, profile_of, try_schedule

CHUNK = 10
"""Seeds of one task of a process."""
MOST_FAILED = 100
"""No schedule is started after so many failures."""
MOST_SHRUNK = 3
"""Kinds of failures that are shrunk at the end."""


def run_seeds(choice: str, first: int, end: int) -> Tally:
    """Run these seeds; in a process of the pool."""
    tally, began = Tally(), time.process_time()
    for seed in range(first, end):
        name = profile_of(choice, seed)
        run = Run(draw_schedule(seed, name))
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
    """Set up a process of the pool. Ctrl-C reaches it too, and must not end its schedule."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ease_collector()


def run_all(ledger: Ledger, path: Path, until: float, ends_at: float, jobs: int, bar: "tqdm[NoReturn]") -> None:
    """Run seeds below `until`, at most until `ends_at` (monotonic seconds). Raises BrokenProcessPool."""
    pending: deque[tuple[int, Future[Tally]]] = deque()
    at = ledger.next_seed
    with ProcessPoolExecutor(jobs, get_context("spawn"), prepare_process) as pool:
        while True:
            hopeless = len(ledger.tally.failed) >= MOST_FAILED
            while len(pending) < 2 * jobs and at < until and not hopeless and time.monotonic() < ends_at:
                first, at = at, int(min(at + CHUNK, until))
                pending.append((at, pool.submit(run_seeds, ledger.profile, first, at)))
            if not pending:
                return
            end, future = pending.popleft()
            tally = future.result()
            for failed in tally.failed:
                bar.write(f"seed {failed.seed} ({failed.profile}): {failed.text}\nreplay: {failed.replay}")
            bar.update(end - ledger.next_seed)
            ledger.next_seed = end
            ledger.tally.add(tally)
            ledger.save(path)


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
    ends_at = math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    stopped = ""
    try:
        with tqdm(total=arguments.seeds, initial=ledger.next_seed, unit="schedule", mininterval=1.0) as bar:
            run_all(ledger, path, arguments.seeds or math.inf, ends_at, arguments.jobs, bar)
    except (BrokenProcessPool, KeyboardInterrupt) as error:
        stopped = f"stopped ({type(error).__name__}); the same command continues"
    text = ledger.report(shlex.join(["python", "-m", "tests.simulation.torture", *argv]))
    path.with_suffix(".md").write_text(text)
    say(f"{text}\n{stopped}")
    if not stopped:
        shrink_some(ledger.tally.failed, arguments.out)
    return 1 if stopped or ledger.tally.failed else 0


def shrink_some(failed: list[Failed], out: Path) -> None:
    """Shrink the first failure of each kind."""
    first_of_kind = {one.kind: one for one in reversed(failed)}
    for one in list(first_of_kind.values())[-MOST_SHRUNK:]:
        schedule = draw_schedule(one.seed, one.profile)
        failure = try_schedule(schedule)
        if failure is not None:
            say(f"seed {one.seed} ({one.profile}): {failure.text}")
            show_shrunk(schedule, failure, out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
