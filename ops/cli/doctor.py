"""`kvferry doctor`: what this machine can do, and what is missing. Never fails because something is missing."""

import argparse
import json
from dataclasses import asdict

from kvferry.ops.cli.errors import DONE

_MARKS = {True: "ok  ", False: "warn"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        help="say what this machine can do and what is missing",
        description="Looks at Python, devices, compiler, memory, ports, the cache and the small model, and says what "
        "is missing. Changes nothing.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look and tell."""
    from kvferry.ops.cli.findings import examine

    findings = examine()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False))
        return DONE
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{_MARKS[finding.ok]} {finding.what:<{width}}  {finding.detail}")
    return DONE
