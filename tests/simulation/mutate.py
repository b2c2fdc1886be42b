"""Which seeded defects the simulation catches, and at which seed: `python -m tests.simulation.mutate`.

With `--table` the result is written to ops/docs/mutations.md, unless a defect was missed. Exit code 1 then.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from kvferry.ops.cli.numbers import positive
from tests.simulation.__main__ import say
from tests.simulation.draw import draw_schedule
from tests.simulation.mutation import Mutation
from tests.simulation.mutations import MUTATIONS
from tests.simulation.trial import ease_collector, try_schedule

PAGE = Path(__file__).parents[2] / "ops/docs/mutations.md"
AT_MOST = 400
_CHARS = 110
_HEAD = f"""\
# What the simulation notices

Made by `python -m tests.simulation.mutate --table`; do not change it by hand.

Each row is a defect put into the real cores: one function replaced by a wrong one (`tests/simulation/mutations*.py`).
Then schedules of the named profile are run, seed 0, 1, 2 and so on, until one fails: that seed, and what it said. A
defect that {AT_MOST} schedules do not catch fails the command. The rules are those of [protocol.md](protocol.md).

| rule | defect | profile | seed | what was noticed |
| ---: | --- | --- | ---: | --- |
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one defect. `seed` is None when it was not caught."""

    mutation: Mutation
    seed: int | None
    told: str

    @property
    def row(self) -> str:
        """Of the table."""
        seed = "NOT CAUGHT" if self.seed is None else str(self.seed)
        told = self.told[:_CHARS].replace("|", "\\|").replace("\n", " ").strip()
        mutation = self.mutation
        return f"| {mutation.rule} | {mutation.name} | {mutation.profile} | {seed} | {told} |"


def first_catch(mutation: Mutation, at_most: int) -> tuple[int | None, str]:
    """The first seed whose schedule fails with the defect, and what it says; None: not caught.

    Raises TypeError when the wrong function does not fit where the right one was: that is a defect of the defect.
    """
    with mutation.applied():
        for seed in range(at_most):
            failure = try_schedule(draw_schedule(seed, mutation.profile))
            if failure is not None and failure.text.startswith("TypeError"):
                raise TypeError(f"{mutation.name}: {failure.text}\n{failure.where}")
            if failure is not None:
                return seed, failure.text
    return None, ""


def _numbered(number: int, at_most: int) -> tuple[int | None, str]:
    return first_catch(MUTATIONS[number], at_most)


def outcomes(numbers: Sequence[int], at_most: int, jobs: int) -> Iterator[Outcome]:
    """In the order of the numbers, on so many processes."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), ease_collector) as pool:
        found = pool.map(_numbered, numbers, [at_most] * len(numbers))
        for number, (seed, told) in zip(numbers, found, strict=True):
            yield Outcome(MUTATIONS[number], seed, told)


def page(found: Sequence[Outcome]) -> str:
    """The page of docs, by rule."""
    ordered = sorted(found, key=lambda outcome: int(outcome.mutation.rule))
    return _HEAD + "\n".join(outcome.row for outcome in ordered) + "\n"


def main(argv: list[str]) -> int:
    """Print the table; 1 when a defect was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutate", description=__doc__)
    parser.add_argument("--seeds", type=positive, default=AT_MOST, help="most schedules for each defect")
    parser.add_argument("--only", default="", help="part of a name; it is tried alone")
    parser.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)), help="processes (all cores)")
    parser.add_argument("--table", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args(argv)
    numbers = [number for number, mutation in enumerate(MUTATIONS) if arguments.only in mutation.name]
    if not numbers:
        parser.error(f"--only: no defect has {arguments.only!r} in its name")
    found: list[Outcome] = []
    for outcome in outcomes(numbers, arguments.seeds, arguments.jobs):
        found.append(outcome)
        say(outcome.row)
    missed = sum(outcome.seed is None for outcome in found)
    say(f"{len(found)} defects, {missed} not caught")
    if arguments.table and not missed and not arguments.only:
        PAGE.write_text(page(found))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
