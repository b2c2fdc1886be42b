"""From an exception to an exit code and one line on stderr. 0 done, 2 wrong use, 1 anything else."""

import os
import sys
import traceback

from common.errors import ConfigError, KvferryError

DEBUG_ENV = "KVFERRY_DEBUG"

DONE, FAILED, WRONG_USE = 0, 1, 2


def report(error: BaseException, command: str, *, debug: bool) -> int:
    """Say what went wrong and return the exit code. With `debug`, or KVFERRY_DEBUG set, the traceback comes first."""
    if debug or os.environ.get(DEBUG_ENV):
        traceback.print_exception(error)
    # Whoever pressed Ctrl-C made no error.
    mark = "" if isinstance(error, KeyboardInterrupt) else "error: "
    sys.stderr.write(f"{command}: {mark}{_text(error)}\n")
    return WRONG_USE if isinstance(error, ConfigError) else FAILED


def _text(error: BaseException) -> str:
    if isinstance(error, KvferryError):
        return " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, BaseExceptionGroup):
        return _text(error.exceptions[0])
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} (a fault of kvferry's own; {DEBUG_ENV}=1 shows where)"
