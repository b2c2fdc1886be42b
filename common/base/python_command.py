"""How this process starts another one of kvferry: a module of this very package, wherever it is installed."""

import sys
from pathlib import Path

import kvferry

_RUNNER = Path(kvferry.__file__).with_name("run_module.py")


def python_command(module: str, *arguments: str, python: str = sys.executable) -> tuple[str, ...]:
    """The command that runs `module` (a dotted name below `kvferry`) as a program with these arguments.

    Nothing in the current folder, in PYTHONPATH or in another distribution can stand in for a part of it.
    """
    return (python, "-P", str(_RUNNER), module, *arguments)
