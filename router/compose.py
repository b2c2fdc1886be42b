"""Builds one gunicorn worker's application from the configuration. Opens nothing before startup."""

import asyncio
import logging
import os
import signal
import threading

from prometheus_client import CollectorRegistry

from kvferry.common.base.clock import MonotonicClock
from kvferry.common.config.endpoints import with_key
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.security import load_security
from kvferry.router.http.app import AppDependencies, create_app
from kvferry.router.http.metrics import metrics_from_environment
from kvferry.router.http.shell import AsgiShell
from kvferry.router.service import RouterService, ServiceSettings

START_WAIT_S = 3.0
"""Several announcement intervals: a running cluster is found within one."""


def build_app(config: ClusterConfig, *, version: str) -> AsgiShell:
    """The ASGI application of a worker. Its service starts with the worker's lifespan and drains at SIGTERM."""
    log = logging.getLogger("kvferry.router")
    security = load_security(config.security, "router")
    context = TransportContext(security)
    clock = MonotonicClock()
    nodes, members = config.router.nodes, config.discovery.proxy_workers
    if security is not None:
        nodes = security.completed("router.nodes", nodes, "node")
        members = with_key(members, security.public) if members else ""  # the proxy of this host has the same key
    settings = ServiceSettings(
        name=f"worker-{os.getpid()}",
        timers=config.timers,
        limits=config.limits,
        static_nodes=nodes,
        announcements=members,
        start_wait_s=START_WAIT_S,
        configured_models=(config.model.name,) if config.model.name else (),
    )
    service = RouterService(settings, clock, context, log)

    async def start() -> None:
        await service.start()
        drain_at_sigterm(service)

    async def stop() -> None:
        await service.stop()
        context.close()

    return create_app(
        AppDependencies(
            service=service,
            settings=config.router,
            metrics=metrics_from_environment(os.environ, CollectorRegistry()),
            access_log=logging.getLogger("kvferry.access"),
            logger=log,
            clock=clock,
            version=version,
            on_startup=start,
            on_shutdown=stop,
        )
    )


def drain_at_sigterm(service: RouterService) -> None:
    """Make SIGTERM drain the service, which finishes its streams within the drain time while the server waits.

    Chains to the server's own handler, which must be installed before. No effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    previous = signal.getsignal(signal.SIGTERM)

    def on_sigterm(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(service.drain)
        if callable(previous):
            previous(number, frame)  # type: ignore[arg-type]

    signal.signal(signal.SIGTERM, on_sigterm)
