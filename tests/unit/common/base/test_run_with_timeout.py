"""No result and no cancellation is lost, however result, timeout and cancellation coincide."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvferry.common.base.run_with_timeout import run_with_timeout
from tests.support.transport import DEADLINE_S

LONG_S = DEADLINE_S


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def result_of(future: "asyncio.Future[str]") -> str:
    return await future


def test_a_result_and_an_exception_come_through():
    async def fails() -> None:
        raise ValueError("no")

    async def main() -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "there")
        assert await run_with_timeout(LONG_S, result_of(future)) == "there"
        with pytest.raises(ValueError, match="no"):
            await run_with_timeout(LONG_S, fails())

    asyncio.run(main())


def test_work_that_times_out_has_ended_when_timeout_is_raised():
    ended = []

    async def slow() -> None:
        try:
            await forever()
        finally:
            ended.append(True)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await run_with_timeout(0.0, slow())

    asyncio.run(main())
    assert ended == [True]


def test_a_result_at_the_timeout_is_returned():
    """It may be a connection that the caller must close."""

    async def just_in_time() -> str:
        try:
            await forever()
        except asyncio.CancelledError:
            return "made"
        return "never"

    async def main() -> None:
        assert await run_with_timeout(0.0, just_in_time()) == "made"

    asyncio.run(main())


async def cancelled_with_the_result(bound: Callable[[float, Awaitable[str]], Awaitable[str]]) -> str:
    """The work finishes and then its caller is cancelled, in one iteration of the loop."""
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    caller = asyncio.ensure_future(bound(LONG_S, result_of(future)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    future.set_result("there")
    await asyncio.sleep(0)  # the work's task ends here, before its caller runs
    caller.cancel()
    done, _ = await asyncio.wait((caller,))
    return "cancelled" if done.pop().cancelled() else "swallowed"


def test_a_cancellation_that_coincides_with_the_result_is_not_swallowed():
    assert asyncio.run(cancelled_with_the_result(run_with_timeout)) == "cancelled"  # type: ignore[arg-type]


def test_a_cancellation_that_coincides_with_the_timeout_stays_a_cancellation():
    """The caller is cancelled in the loop iteration in which the time expires, before or after that."""

    async def main(cancel_first: bool) -> bool:
        loop = asyncio.get_running_loop()
        bounded = run_with_timeout(0.0, forever())
        caller: asyncio.Task[None] = loop.create_task(bounded)
        if cancel_first:
            loop.call_soon(caller.cancel)
        else:
            loop.call_later(0.0, lambda: loop.call_soon(caller.cancel))
        done, _ = await asyncio.wait((caller,))
        return done.pop().cancelled()

    assert asyncio.run(main(cancel_first=True))
    assert asyncio.run(main(cancel_first=False))


def test_cancelling_the_caller_ends_the_work():
    ended = []

    async def slow() -> None:
        try:
            await forever()
        finally:
            ended.append(True)

    async def main() -> None:
        caller = asyncio.get_running_loop().create_task(run_with_timeout(LONG_S, slow()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert ended == [True]

    asyncio.run(main())
