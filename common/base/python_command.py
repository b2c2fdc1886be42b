"""The command line that starts another kvferry process from the same installation as this one."""

import sys
from pathlib import Path

import kvferry

_RUNNER = Path(kvferry.__file__).with_name("run_module.py")


def python_command(module: str, *arguments: str, python: str = sys.executable) -> tuple[str, ...]:
    """The command that runs `module` (a dotted name below `kvferry`) as a program with these arguments.

    Modules in the current folder, in PYTHONPATH or in another distribution cannot shadow any part of it.
    """
    return (python, "-P", str(_RUNNER), module, *arguments)
