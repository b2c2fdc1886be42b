"""What the HTTP layer is constructed with. Plain data; nothing here is created or opened."""

import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvferry.common.base.clock import Clock, MonotonicClock
from kvferry.common.base.ids import RequestId, new_request_id
from kvferry.common.config.schema import RouterConfig
from kvferry.router.api import TokenService
from kvferry.router.http.metrics import RouterMetrics


def new_seed() -> int:
    """A random seed, in [1, 2**64 - 1], for a request that has none."""
    return int.from_bytes(os.urandom(8), "little") or 1


async def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppDependencies:
    """What `create_app` needs. Tests replace any of it."""

    service: TokenService
    settings: RouterConfig
    metrics: RouterMetrics
    access_log: logging.Logger
    """One record per request."""
    logger: logging.Logger
    """Internal errors, with their tracebacks."""
    clock: Clock = field(default_factory=MonotonicClock)
    new_request_id: Callable[[], RequestId] = new_request_id
    new_seed: Callable[[], int] = new_seed
    server_name: str = "kvferry"
    version: str = ""
    started_at: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""
    on_startup: Callable[[], Awaitable[None]] = _nothing
    """Awaited on the worker's event loop before the first request; an exception stops the worker."""
    on_shutdown: Callable[[], Awaitable[None]] = _nothing
    """Awaited on the same loop after the last request."""
