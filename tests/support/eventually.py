"""Waiting for a condition, with a deadline, in place of sleeps of a guessed length."""

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.005
PATIENCE_S = 60.0
"""For what must happen: far longer than it takes, since a busy machine is no fault. A wait ends when it happens."""


async def eventually(condition: Callable[[], bool], what: str, deadline_s: float = PATIENCE_S) -> None:
    """Return as soon as the condition holds; AssertionError naming `what` when the deadline passes first."""
    until = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"did not happen within {deadline_s} s: {what}")
        await asyncio.sleep(POLL_S)
