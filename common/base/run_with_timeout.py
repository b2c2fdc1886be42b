"""Runs a coroutine with a timeout that loses neither its result nor a cancellation. For event loops.

`asyncio.timeout` and `asyncio.wait_for` are not used, for three reasons. Both can discard a result that arrives as the
time expires, so a connection that was just made stays open. `wait_for` before Python 3.12 swallows a cancellation that
coincides with the result (python/cpython#86296). `timeout` can mistake a cancellation from outside for its own
(python/cpython#134471; `uncancel` rescinds a pending request only from Python 3.13). Here the work is a task of its
own, so result, timeout and cancellation of the caller are separate events.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def run_with_timeout(timeout_s: float | None, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the work's result or raise its exception. TimeoutError: it was cancelled and has ended.

    `timeout_s=None` waits without a limit. A result that arrives as the time expires is returned. A cancellation of the
    caller always takes effect.
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
