"""`python -m tests.chaos`: real processes under load that are killed, stopped, drained and cut; a report at the end.

Exit code 0 when nothing was lost, hung, repeated, corrupted or left behind.
"""

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry.ops.cli.numbers import above_zero, count, positive, three_counts
from tests.chaos.client_requests import REAL_SIZES, Sizes, pool
from tests.chaos.fault_proxy import ProxyLinks
from tests.chaos.links import Links
from tests.chaos.load import Target
from tests.chaos.namespaces import NamespaceLinks, can_have_namespaces, enter_hub
from tests.chaos.report import write_report
from tests.chaos.testbed import REAL_SETTINGS, VOCAB_SIZE, Shape, Testbed, fill_in, running_testbed, tiny_model
from tests.chaos.trial import Plan, Result, run_trial
from tests.support.keys import KeyRing
from tests.support.real_model import real_model_path

_SETTINGS = {
    # Faults come far more often than in the field: a request may meet many, and none of them is its doing.
    "limits.max_attempts": 100,
    "limits.crash_limit": 100,
    "serve.restart_min_s": 0.2,
    "serve.restart_max_s": 1.0,
    "serve.healthy_after_s": 2.0,
    "log.access_log": "false",
}
_TINY = {"requests": 5000, "faults": 200, "gap": 3.0, "clients": 24, "think": 1.5, "pool": 96}
_REAL = {"requests": 500, "faults": 25, "gap": 8.0, "clients": 12, "think": 1.5, "pool": 16}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="the small real model, and smaller numbers")
    parser.add_argument("--keys", action="store_true", help="with keys on all sockets")
    parser.add_argument(
        "--nodes", type=three_counts("P,D,U"), default=(2, 2, 0), metavar="P,D,U", help="how many of each role (2,2,0)"
    )
    parser.add_argument("--requests", type=positive, help="at least so many (5000; real 500)")
    parser.add_argument("--faults", type=count, help="kills, stops, SIGTERMs and cuts (200; real 25)")
    parser.add_argument("--gap", type=above_zero, help="mean seconds between two faults (3; real 8)")
    parser.add_argument("--clients", type=positive, help="(24; real 12)")
    parser.add_argument("--think", type=above_zero, help="mean seconds between two requests of a client (1.5)")
    parser.add_argument("--pool", type=positive, help="different generations (96; real 16)")
    parser.add_argument("--most-s", type=above_zero, default=1500.0, help="it ends then in any case (1500)")
    parser.add_argument("--no-namespaces", action="store_true", help="cut links with the proxy in any case")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    args = parser.parse_args(argv)
    return fill_in(args, _REAL if args.real else _TINY)


def main(argv: list[str]) -> int:
    args = parse(argv)
    make_links: Callable[[Sequence[str]], Links] = ProxyLinks
    if not args.no_namespaces and can_have_namespaces():
        enter_hub(["-m", "tests.chaos", *argv])
        make_links = NamespaceLinks
    report = "chaos-real" if args.real else "chaos"
    plan = Plan(args.seed, args.requests, args.faults, args.gap, args.clients, args.think, args.most_s)
    with tempfile.TemporaryDirectory(prefix="kvf-chaos-") as name:
        directory = Path(name)
        model = real_model_path() if args.real else tiny_model(directory / "m")
        keys = KeyRing(directory / "keys") if args.keys else None
        settings = {**_SETTINGS, **REAL_SETTINGS} if args.real else _SETTINGS
        prefill, decode, colocated = args.nodes
        shape = Shape(model, prefill, decode, settings=settings, keys=keys, colocated=colocated)
        with running_testbed(shape, directory, make_links) as testbed:
            try:
                result = asyncio.run(run_trial(testbed, plan, _target(testbed, args)))
            finally:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / f"{report}.log").write_text(testbed.served.log())
            page = write_report(result, args.out, shlex.join(["python", "-m", "tests.chaos", *argv]), report)
    sys.stdout.write(page.read_text())
    return _code(result)


def _target(testbed: Testbed, args: argparse.Namespace) -> Target:
    sizes = REAL_SIZES if args.real else Sizes(vocab_size=VOCAB_SIZE)
    return Target(testbed.served.port, testbed.served.model, pool(args.seed, args.pool, sizes))


def _code(result: Result) -> int:
    reached = len(result.records) >= result.plan.requests and len(result.injected) >= result.plan.faults
    return 0 if reached and not result.wrong else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
