"""Runs schedules: `python -m tests.simulation --seeds A:B [--profile NAME] [--nodes W,P,D] [--trace]`.

Prints the number of schedules per minute. Stops at the first seed that fails, prints the command that replays it,
shrinks the schedule and prints the command that replays the short one. Exits with code 1 in that case.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvferry.ops.cli.numbers import count, positive, three_counts
from kvferry.ops.simulate.process import Process
from tests.simulation.draw import draw_schedule
from tests.simulation.profiles import PROFILES
from tests.simulation.run import Run
from tests.simulation.schedule import Schedule
from tests.simulation.shrink import describe, shrink
from tests.simulation.trial import Failure, attempt, ease_collector, profile_of

SHRUNK = Path("build/simulation")
"""Directory of shrunk schedules."""


def say(line: str) -> None:
    """Print one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    """See the module's docstring."""
    arguments = parse(argv)
    ease_collector()
    started, total, failures, tried = time.perf_counter(), Counter[str](), 0, 0
    for schedule, replay in _schedules(arguments):
        tried += 1
        failures += not _run_one(schedule, replay, arguments, total)
        if failures > arguments.keep_going:
            return 1
    elapsed = time.perf_counter() - started
    for what, number in sorted(total.items(), key=lambda item: -item[1]):
        if arguments.verbose or not what.startswith(("quiet", " ")):
            say(f"{number:8} {what}")
    say(f"{tried} schedules, {failures} failed, {60 * tried / elapsed:.0f} a minute")
    return 1 if failures else 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description="Run simulated schedules of faults."
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", default=(0, 100), type=_range, help="half-open range A:B (default 0:100)")
    which.add_argument("--schedule", type=_schedule, metavar="FILE", help="run the schedule in this file instead")
    parser.add_argument("--profile", choices=[*PROFILES, "each"], help="profile of the seeds (default all)")
    parser.add_argument(
        "--nodes",
        default=None,
        type=three_counts("W,P,D"),
        help="numbers of workers, prefill, decode nodes: W,P,D",
    )
    parser.add_argument(
        "--check-every",
        type=positive,
        default=64,
        help="check a core after every n-th event (default 64)",
    )
    parser.add_argument("--keep-going", type=count, default=0, help="continue after this many failures")
    parser.add_argument("--no-shrink", action="store_true", help="do not shrink a failing schedule")
    parser.add_argument("--trace", action="store_true", help="print every event and action; implies --no-shrink")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.schedule and (arguments.profile or arguments.nodes):
        parser.error("--schedule: the file has its own profile and nodes; --profile and --nodes are for --seeds")
    arguments.profile = arguments.profile or "all"
    return arguments


def _range(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    try:
        seeds = int(first), int(end)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected A:B such as 0:100, got {text!r}") from None
    if not 0 <= seeds[0] < seeds[1]:
        raise argparse.ArgumentTypeError(f"{text} is an empty range: B is excluded, and 0 <= A < B must hold")
    return seeds


def _schedule(text: str) -> tuple[Schedule, str]:
    try:
        return Schedule.load(Path(text)), text
    except (OSError, msgspec.DecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _schedules(arguments: argparse.Namespace) -> Iterator[tuple[Schedule, str]]:
    """Yield each schedule with the arguments that reproduce it."""
    if arguments.schedule is not None:
        schedule, path = arguments.schedule
        yield schedule, f"--schedule {path}"
        return
    counts = arguments.nodes
    nodes = " --nodes " + ",".join(map(str, counts)) if counts else ""
    for seed in range(*arguments.seeds):
        name = profile_of(arguments.profile, seed)
        yield draw_schedule(seed, name, counts), f"--seeds {seed}:{seed + 1} --profile {name}{nodes}"


def _run_one(schedule: Schedule, replay: str, arguments: argparse.Namespace, total: Counter[str]) -> bool:
    run = Run(schedule, arguments.check_every)
    if arguments.trace:
        run.monitor.also = lambda process, what: _show(run, process, what)
        for line in describe(schedule):
            say(line)
    failure = attempt(run)
    total.update(run.counts)
    total.update({f"  {what}": count for what, count in (run.monitor.counts + run.faults.total()).items()})
    if failure is None:
        return True
    say(f"seed {schedule.seed} ({schedule.profile}) at {failure.at_s:.3f} s: {failure.text}")
    if not arguments.keep_going:
        say(failure.where)
    say(f"replay: python -m tests.simulation {replay} --trace")
    if not (arguments.no_shrink or arguments.trace or arguments.schedule):
        show_shrunk(schedule, failure, SHRUNK)
    return False


def show_shrunk(schedule: Schedule, failure: Failure, directory: Path) -> None:
    """Shrink a schedule, save it to a file in this directory and print it."""
    short, how = shrink(schedule, failure)
    path = directory / f"{schedule.profile}-{schedule.seed}.json"
    short.save(path)
    say(f"shrunk from {len(schedule.events)} to {len(short.events)} events; fails at {how.at_s:.3f} s: {how.text}")
    for line in describe(short):
        say(line)
    say(f"replay: python -m tests.simulation --schedule {path} --trace")


def _show(run: Run, process: Process, what: object) -> None:
    text = str(what)
    if "Tick(" not in text and "message=Status(" not in text:
        say(f"{run.world.loop.now():8.4f} {process.host:3} {text[:400]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
