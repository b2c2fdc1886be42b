"""Small real child processes for tests of the launcher."""

import asyncio
import contextlib
import sys
import textwrap
from collections.abc import Callable, Coroutine
from typing import Any

import psutil

from kvferry.ops.launcher.core import ChildPlan, Stage
from kvferry.ops.launcher.process import ChildSpec
from tests.support.eventually import PATIENCE_S
from tests.support.processes import has_ended

SERVES = "import signal, sys; print('up', flush=True); signal.sigwait({15}); print('bye', flush=True)"
"""Prints `up`, and `bye` after SIGTERM."""
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
"""Prints `up` and ignores SIGTERM."""


def child(name: str, code: str, stage: Stage = Stage.DECODE, bound_s: float = PATIENCE_S, **more: Any) -> ChildSpec:
    """A child that runs this Python code."""
    if "sigwait" in code:
        code = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); " + code
    return ChildSpec(ChildPlan(name, stage, bound_s), (sys.executable, "-c", textwrap.dedent(code)), **more)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function to its end, within PATIENCE_S."""
    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not has_ended(psutil.Process(pid))
    return False
