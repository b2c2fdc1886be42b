"""Runs schedules: `python -m tests.simulation --seeds A:B [--profile NAME] [--nodes W,P,D] [--trace]`.

Prints schedules a minute; stops at the first seed that fails, with the command that replays it. Exit code 1 then.
"""

import argparse
import sys
import time
import traceback
from collections import Counter

from ops.simulate.process import Process
from tests.simulation.draw import draw_plan
from tests.simulation.profiles import PROFILES
from tests.simulation.run import Run


def say(line: str) -> None:
    """One line for whoever runs this."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """See the module's docstring."""
    arguments = _parse()
    first, end = (int(part) for part in arguments.seeds.split(":"))
    names = list(PROFILES) if arguments.profile == "each" else [arguments.profile]
    started, total, failures = time.perf_counter(), Counter[str](), 0
    for number, seed in enumerate(range(first, end)):
        name = names[number % len(names)]
        if not _run_one(seed, name, arguments, total):
            failures += 1
            if failures > arguments.keep_going:
                return 1
    elapsed = time.perf_counter() - started
    for what, count in sorted(total.items(), key=lambda item: -item[1]):
        if arguments.verbose or not what.startswith(("quiet", " ")):
            say(f"{count:8} {what}")
    say(f"{end - first} schedules, {failures} failed, {60 * (end - first) / elapsed:.0f} a minute")
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulated schedules of faults.")
    parser.add_argument("--seeds", default="0:100", help="half-open range A:B")
    parser.add_argument("--profile", default="all", choices=[*PROFILES, "each"])
    parser.add_argument("--nodes", default="", help="numbers of workers, prefill and decode nodes, as W,P,D")
    parser.add_argument("--check-every", type=int, default=64, help="check cores after every n-th event of a process")
    parser.add_argument("--keep-going", type=int, default=0, help="stop only after this many more failures")
    parser.add_argument("--trace", action="store_true", help="print every event and action")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def _run_one(seed: int, name: str, arguments: argparse.Namespace, total: Counter[str]) -> bool:
    counts = tuple(int(part) for part in arguments.nodes.split(",")) if arguments.nodes else None
    plan = draw_plan(seed, name, counts)  # type: ignore[arg-type]
    run = Run(plan, arguments.check_every)
    if arguments.trace:
        run.watch.also = lambda process, what: _show(run, process, what)
        for deed in plan.deeds:
            say(f"plan {deed}")
    try:
        total.update(run.run())
        total.update({f"  {what}": count for what, count in run.watch.counts.items()})
    except Exception as error:  # noqa: BLE001  (whatever a core raises is a finding)
        nodes = f" --nodes {arguments.nodes}" if arguments.nodes else ""
        say(f"seed {seed} ({name}) at {run.world.loop.now():.3f} s: {type(error).__name__}: {error}")
        if not arguments.keep_going:
            say("".join(traceback.format_exception(error, limit=-8)))
        say(f"replay: python -m tests.simulation --seeds {seed}:{seed + 1} --profile {name}{nodes} --trace")
        return False
    return True


def _show(run: Run, process: Process, what: object) -> None:
    text = str(what)
    if "Tick(" not in text and "message=Status(" not in text:
        say(f"{run.world.loop.now():8.4f} {process.host:3} {text[:400]}")


if __name__ == "__main__":
    sys.exit(main())
