"""`kvferry doctor`: reports what this machine can run and what is missing, which never is an error."""

import argparse
import json
from dataclasses import asdict

from kvferry.ops.cli.errors import DONE

_MARKS = {True: "ok  ", False: "warn"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="report what this machine can run and what is missing",
        description="Checks Python, devices, compiler, memory, ports, the cache and the small real model, and reports "
        "what is missing. Changes nothing.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from kvferry.ops.cli.findings import examine

    findings = examine()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False))
        return DONE
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{_MARKS[finding.ok]} {finding.what:<{width}}  {finding.detail}")
    return DONE
