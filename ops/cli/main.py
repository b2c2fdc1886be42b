"""The command `kvferry`: parses the command line, runs the command, and turns an exception into an exit code and one
line on stderr."""

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from kvferry.ops.cli import bench, demo, doctor, infer, keys, node, router, serve
from kvferry.ops.cli.errors import DONE, USAGE_ERROR, report

_COMMANDS = (serve, router, node, infer, keys, doctor, bench, demo)


class _Parser(argparse.ArgumentParser):
    """Reports a usage error on one line, under the name of the subcommand."""

    def __init__(self, *, prog: str | None = None, description: str | None = None) -> None:
        super().__init__(prog=prog, description=description)
        # Nested parsers: the innermost one overwrites this default.
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvferry", description="A disaggregated prefill/decode LLM token-inference server.")
    parser.add_argument("--version", action="version", version=f"kvferry {_version()}")
    parser.add_argument("--debug", action="store_true", help="print tracebacks (same as KVFERRY_DEBUG=1)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    command: str = args.parser.prog
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe (`| head`), which is no error. The flush at exit must not fail again.
        sys.stdout = None
        return DONE
    except KeyboardInterrupt as error:
        return report(error, command, debug=args.debug)
    except Exception as error:  # noqa: BLE001 - a user gets one line, never a traceback
        return report(error, command, debug=args.debug)
    return code


def _version() -> str:
    try:
        return version("kvferry")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
