"""From an exception to an exit code and one line on stderr.

0: done. 2: what was asked for is wrong, and will be the next time: an option, a setting, a file, model or device that
it names, a request that the server refuses as invalid. 1: it failed while running.
"""

import os
import sys
import traceback

from kvferry.common.base.errors import (
    ConfigError,
    DeviceUnavailableError,
    KvferryError,
    ModelLoadError,
    RequestInvalidError,
)

DEBUG_ENV = "KVFERRY_DEBUG"

DONE, FAILED, WRONG_USE = 0, 1, 2
_WRONG_USE = (ConfigError, ModelLoadError, DeviceUnavailableError, RequestInvalidError)


def report(error: BaseException, command: str, *, debug: bool) -> int:
    """Say what went wrong and return the exit code. With `debug`, or KVFERRY_DEBUG set, the traceback comes first."""
    if debug or os.environ.get(DEBUG_ENV):
        traceback.print_exception(error)
    # Whoever pressed Ctrl-C made no error.
    mark = "" if isinstance(error, KeyboardInterrupt) else "error: "
    if sys.stderr is not None:  # None when it was closed before the start
        sys.stderr.write(f"{command}: {mark}{_text(error)}\n")
    return WRONG_USE if isinstance(_first(error), _WRONG_USE) else FAILED


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _text(error: BaseException) -> str:
    error = _first(error)
    if isinstance(error, KvferryError):
        return " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} (a fault of kvferry's own; {DEBUG_ENV}=1 shows where)"
