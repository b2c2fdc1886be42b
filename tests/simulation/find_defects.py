"""Find the first seed at which the simulation notices each seeded defect: `python -m tests.simulation.find_defects`.

With `--table` the result is written to ops/docs/defects.md, unless a defect was missed. Exit code 1 then.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from kvferry.ops.cli.numbers import positive
from tests.simulation.__main__ import say
from tests.simulation.defects import DEFECTS, Defect
from tests.simulation.draw import draw_schedule
from tests.simulation.trial import ease_collector, try_schedule

PAGE = Path(__file__).parents[2] / "ops/docs/defects.md"
MOST_SEEDS = 400
UNFIT = ("TypeError", "AttributeError", "NameError")
_CHARS = 90
_HEAD = f"""\
# Defects that the simulation notices

Made by `python -m tests.simulation.find_defects --table`; do not edit.

Each row is a defect put into the real cores through a public method or a message (`tests/simulation/defects.py`).
Schedules of the named profile are run with it, seed 0, 1, 2 and so on, until one fails: that seed, and its failure.
The command fails if {MOST_SEEDS} schedules do not reveal a defect. `tests/simulation/test_defects.py` runs the seeds
of this page.

| promise | defect | profile | seed | failure |
| --- | --- | --- | ---: | --- |
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The first failing seed of one defect, and its failure; seed None: not noticed."""

    defect: Defect
    seed: int | None
    failure: str

    @property
    def row(self) -> str:
        """A row of the page."""
        seed = "NOT NOTICED" if self.seed is None else str(self.seed)
        failure = self.failure[:_CHARS].replace("|", "\\|").replace("\n", " ").strip()
        return f"| {self.defect.promise} | {self.defect.name} | {self.defect.profile} | {seed} | {failure} |"


def find(defect: Defect, seeds: Iterable[int]) -> Outcome:
    """Run schedules until one fails with the defect.

    Raises TypeError when the defect does not fit what it wraps: that is an error of the defect.
    """
    with defect.applied():
        for seed in seeds:
            failure = try_schedule(draw_schedule(seed, defect.profile))
            if failure is not None and failure.text.startswith(UNFIT):
                raise TypeError(f"{defect.name}: {failure.text}\n{failure.where}")
            if failure is not None:
                return Outcome(defect, seed, failure.text)
    return Outcome(defect, None, "")


def _find(number: int, most_seeds: int) -> tuple[int | None, str]:
    outcome = find(DEFECTS[number], range(most_seeds))
    return outcome.seed, outcome.failure


def outcomes(numbers: Sequence[int], most_seeds: int, jobs: int) -> Iterator[Outcome]:
    """Yield in the order of the numbers, on so many processes."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), ease_collector) as pool:
        found = pool.map(_find, numbers, [most_seeds] * len(numbers))
        for number, (seed, failure) in zip(numbers, found, strict=True):
            yield Outcome(DEFECTS[number], seed, failure)


def page(found: Iterable[Outcome]) -> str:
    """The text of ops/docs/defects.md."""
    return _HEAD + "".join(f"{outcome.row}\n" for outcome in found)


def main(argv: list[str]) -> int:
    """Print the table; 1 when a defect was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.find_defects", description=__doc__)
    parser.add_argument("--seeds", type=positive, default=MOST_SEEDS, help="most schedules for each defect")
    parser.add_argument("--only", default="", help="part of a name: run only defects with it")
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)), help="processes (all cores)")
    parser.add_argument("--table", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args(argv)
    numbers = [number for number, defect in enumerate(DEFECTS) if arguments.only in defect.name]
    if not numbers:
        parser.error(f"--only: no defect has {arguments.only!r} in its name")
    found: list[Outcome] = []
    for outcome in outcomes(numbers, arguments.seeds, arguments.jobs):
        found.append(outcome)
        say(outcome.row)
    missed = sum(outcome.seed is None for outcome in found)
    say(f"{len(found)} defects, {missed} not noticed")
    if arguments.table and not missed and not arguments.only:
        PAGE.write_text(page(found))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
