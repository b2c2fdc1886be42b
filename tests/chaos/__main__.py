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

from tests.chaos.asks import Sizes, pool
from tests.chaos.crowd import Target
from tests.chaos.fault_proxy import ProxyLinks
from tests.chaos.links import Links
from tests.chaos.namespaces import NamespaceLinks, can_have_namespaces, enter_hub
from tests.chaos.report import write_report
from tests.chaos.stand import Shape, Stand, standing, tiny_model
from tests.chaos.trial import Plan, Result, run_trial

_SETTINGS = {
    # Faults come far more often than in the field: a request may meet many, and none of them is its doing.
    "limits.max_attempts": 100,
    "limits.crash_limit": 100,
    "serve.restart_min_s": 0.2,
    "serve.restart_max_s": 1.0,
    "serve.healthy_after_s": 2.0,
    "log.access_log": "false",
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=5000, help="at least so many (5000)")
    parser.add_argument("--faults", type=int, default=200, help="kills, stops, SIGTERMs and cuts (200)")
    parser.add_argument("--gap", type=float, default=3.0, help="mean seconds between two faults (3)")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--think", type=float, default=1.5, help="mean seconds between two requests of a client (1.5)")
    parser.add_argument("--pool", type=int, default=96, help="different generations (96)")
    parser.add_argument("--most-s", type=float, default=1500.0, help="it ends then in any case (1500)")
    parser.add_argument("--no-namespaces", action="store_true", help="cut links with the proxy in any case")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    make_links: Callable[[Sequence[str]], Links] = ProxyLinks
    if not args.no_namespaces and can_have_namespaces():
        enter_hub(["-m", "tests.chaos", *argv])
        make_links = NamespaceLinks
    plan = Plan(args.seed, args.requests, args.faults, args.gap, args.clients, args.think, args.most_s)
    with tempfile.TemporaryDirectory(prefix="kvf-chaos-") as name:
        directory = Path(name)
        shape = Shape(tiny_model(directory / "m"), settings=_SETTINGS)
        with standing(shape, directory, make_links) as stand:
            try:
                result = asyncio.run(run_trial(stand, plan, _target(stand, args)))
            finally:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "chaos.log").write_text(stand.served.log())
            page = write_report(result, args.out, shlex.join(["python", "-m", "tests.chaos", *argv]))
    sys.stdout.write(page.read_text())
    return _code(result)


def _target(stand: Stand, args: argparse.Namespace) -> Target:
    return Target(stand.served.port, stand.served.model, pool(args.seed, args.pool, Sizes()))


def _code(result: Result) -> int:
    reached = len(result.records) >= result.plan.requests and len(result.strikes) >= result.plan.faults
    return 0 if reached and not result.wrong else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
