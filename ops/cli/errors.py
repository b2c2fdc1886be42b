"""Maps an exception to an exit code and one line on stderr.

0: success. 2: the command line, the configuration, or a file, model, device or request that it names is wrong; a retry
fails again. 1: a failure at run time.
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

DONE, FAILED, USAGE_ERROR = 0, 1, 2
_USAGE_ERRORS = (ConfigError, ModelLoadError, DeviceUnavailableError, RequestInvalidError)


def report(error: BaseException, command: str, *, debug: bool) -> int:
    """Write the error line and return the exit code. With `debug` or KVFERRY_DEBUG, write the traceback first."""
    if debug or os.environ.get(DEBUG_ENV):
        traceback.print_exception(error)
    # A Ctrl-C is not an error.
    mark = "" if isinstance(error, KeyboardInterrupt) else "error: "
    if sys.stderr is not None:  # None if it was closed before the start
        sys.stderr.write(f"{command}: {mark}{_text(error)}\n")
    return USAGE_ERROR if isinstance(_first(error), _USAGE_ERRORS) else FAILED


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _text(error: BaseException) -> str:
    error = _first(error)
    if isinstance(error, KvferryError):
        return " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} (a bug in kvferry; {DEBUG_ENV}=1 prints the traceback)"
