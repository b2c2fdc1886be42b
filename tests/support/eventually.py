"""Waits for a condition with a deadline, instead of sleeping for a guessed time."""

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.005
PATIENCE_S = 60.0
"""Deadline for what must happen, far longer than it takes: a busy machine must not fail a test."""


async def eventually(condition: Callable[[], bool], what: str, deadline_s: float = PATIENCE_S) -> None:
    """Return as soon as the condition holds; AssertionError naming `what` when the deadline passes first."""
    until = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"did not happen within {deadline_s} s: {what}")
        await asyncio.sleep(POLL_S)
