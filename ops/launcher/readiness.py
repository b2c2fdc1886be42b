"""Polls the router's health endpoint. Speaks a few lines of HTTP/1.1 on asyncio, so that the launcher needs no HTTP
library."""

import asyncio
from urllib.parse import urlsplit

from kvferry.common.base.run_with_timeout import run_with_timeout

_ANSWER_WAIT_S = 5.0
_PAUSE_S = 0.1
_ASKS_PER_WORKER = 4
_ROUNDS = 2


async def wait_until_answered(url: str, path: str, workers: int) -> None:
    """Return when every worker answers `path` with 200.

    The kernel chooses which worker accepts a connection. Several connections for each worker are opened at the same
    time, in two rounds, so that a worker without any is very unlikely.
    """
    rounds = 0
    while rounds < _ROUNDS:
        if await status_of(url, path) == 200 and await _all_answer(url, path, _ASKS_PER_WORKER * workers):
            rounds += 1
        else:
            rounds = 0
            await asyncio.sleep(_PAUSE_S)


async def _all_answer(url: str, path: str, count: int) -> bool:
    return all(status == 200 for status in await asyncio.gather(*(status_of(url, path) for _ in range(count))))


async def status_of(url: str, path: str) -> int:
    """The status of one GET; 0 if there was no answer in time."""
    try:
        return await run_with_timeout(_ANSWER_WAIT_S, _get(url, path))
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
        return 0


async def _get(url: str, path: str) -> int:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode("ascii"))
        await writer.drain()
        return int((await reader.readline()).split()[1])
    except IndexError:
        return 0
    finally:
        writer.close()
