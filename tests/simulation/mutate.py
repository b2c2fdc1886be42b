"""Which seeded defects the simulation catches, and with how many schedules: `python -m tests.simulation.mutate`."""

import argparse
import sys

from tests.simulation.__main__ import say
from tests.simulation.draw import draw_plan
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.run import Run


def seeds_needed(mutation: Mutation, at_most: int) -> tuple[int | None, str]:
    """How many schedules until one fails with the defect, and what it says; None: not caught."""
    with mutation.applied():
        for seed in range(at_most):
            try:
                Run(draw_plan(seed, mutation.profile)).run()
            except Exception as error:  # noqa: BLE001  (whatever a core raises is a catch)
                return seed + 1, f"{type(error).__name__}: {error}"
    return None, ""


def main() -> int:
    """Print the table; 1 when a defect was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="most schedules for each defect")
    parser.add_argument("--only", default="", help="part of a name")
    arguments = parser.parse_args()
    missed = 0
    for mutation in MUTATIONS:
        if arguments.only not in mutation.name:
            continue
        needed, told = seeds_needed(mutation, arguments.seeds)
        missed += needed is None
        count = "NOT CAUGHT" if needed is None else f"{needed} seeds"
        say(f"| {mutation.rule:>2} | {mutation.name:45} | {mutation.profile:10} | {count:>10} | {told[:90]}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
