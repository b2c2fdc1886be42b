"""A bound on how long a coroutine may take. For event loops; knows nothing of what it runs.

Neither `asyncio.timeout` nor `asyncio.wait_for` is used: what is awaited when the time is over can have its result
thrown away (a connection that was just made stays open), `wait_for` before Python 3.12 swallows a cancellation that
meets the result (python/cpython#86296), and `timeout` can take one from outside for its own (python/cpython#134471;
a pending request is rescinded by `uncancel` from 3.13 on only). Here the work is a task of its own, and each of the
three things that can happen is told by who was asked.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_with_timeout(timeout_s: float | None, work: Coroutine[Any, Any, T]) -> T:
    """The work's result, or its exception. TimeoutError when it was not done in time: it was cancelled and has ended.

    No time (None) is no bound. A result that comes with the end of the time is returned. A cancellation of the caller
    is never lost.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait((task,), timeout=timeout_s)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    if task.cancelled():
        raise TimeoutError
    return task.result()
