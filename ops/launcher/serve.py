"""Runs `kvferry serve` and `kvferry router`: binds the socket, makes the run directory, supervises the children, and
prints one line when HTTP is served."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from kvferry.common.base.clock import MonotonicClock
from kvferry.common.base.log_writer import STDERR_FD, STDOUT_FD, LogWriter
from kvferry.common.config.checks import config_notes, host_notes
from kvferry.common.config.docs import config_as_toml
from kvferry.common.config.host import probe_host
from kvferry.common.config.keys import KeyRole
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.transport.security import load_security
from kvferry.ops.launcher.cluster import (
    cluster_children,
    node_names,
    restart_limits,
    router_children,
    router_config,
    serve_config,
)
from kvferry.ops.launcher.listen import Listener, listen
from kvferry.ops.launcher.process import ChildSpec, prefixed
from kvferry.ops.launcher.progress import reporting_progress
from kvferry.ops.launcher.readiness import wait_until_answered
from kvferry.ops.launcher.run_dir import run_directory
from kvferry.ops.launcher.supervisor import STOP_SIGNALS, Supervisor

_LOG = logging.getLogger("kvferry.launcher")
_CONFIG_FILE = "cluster.toml"


def serve(config: ClusterConfig, place: Callable[[ChildSpec], ChildSpec] = lambda spec: spec) -> None:
    """Run a cluster on this machine until it is stopped. `config` must name the model. Raises KvferryError if it fails.

    `place` may replace the specification of a child, to change where or how it runs.
    """
    model, host = config.model, probe_host()
    for note in host_notes(config, host):
        _LOG.warning(note)
    with _prepared(config, ("node", "router")) as (listener, run_dir):
        config = serve_config(config, run_dir, model_path=model.path, name=model.name, port=listener.port, host=host)
        file = _write_config(config, run_dir)
        children = [place(spec) for spec in cluster_children(config, file, run_dir, listener.socket.fileno())]
        ready_line = f"ready {listener.url} model={model.name}"
        nodes = node_names(config)

        async def wait_ready() -> None:
            async with reporting_progress(config, nodes, _LOG.info):
                await wait_until_answered(listener.url, "/v2/health/ready", config.router.workers)

        _supervise(children, config, listener, wait_ready, ready_line)


def serve_router(config: ClusterConfig) -> None:
    """Run this host's router workers and announcement proxy until they are stopped."""
    with _prepared(config, ("router",)) as (listener, run_dir):
        config = router_config(config, listener.port)
        file = _write_config(config, run_dir)
        children = router_children(config, file, run_dir, listener.socket.fileno())

        async def wait_ready() -> None:
            await wait_until_answered(listener.url, "/v2/health/live", config.router.workers)

        _supervise(children, config, listener, wait_ready, f"listening {listener.url}")


@contextlib.contextmanager
def _prepared(config: ClusterConfig, roles: tuple[KeyRole, ...]) -> Iterator[tuple[Listener, Path]]:
    for note in config_notes(config):
        _LOG.warning(note)
    for role in roles:
        _check_keys(config, role)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    listener = listen(config.router.host, config.router.port, config.router.backlog)
    try:
        with run_directory() as run_dir:
            yield listener, run_dir
    finally:
        listener.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    _LOG.info("stopped")


def _check_keys(config: ClusterConfig, role: KeyRole) -> None:
    """Report wrong keys once, before any child does. Raises ConfigError."""
    security = load_security(config.security, role)
    if security is not None and role == "router":
        security.completed("router.nodes", config.router.nodes, "node")


def _supervise(
    children: Sequence[ChildSpec],
    config: ClusterConfig,
    listener: Listener,
    wait_ready: Callable[[], Awaitable[None]],
    ready_line: str,
) -> None:
    stdout, stderr = LogWriter(STDOUT_FD), LogWriter(STDERR_FD)
    supervisor = Supervisor(
        children,
        restart_limits(config),
        MonotonicClock(),
        wait_ready=wait_ready,
        on_ready=lambda: stdout.write(ready_line),
        # While the launcher's copy is open, new connections would be accepted by the kernel and never answered.
        on_stop=listener.close,
        write_line=lambda name, line: stderr.write(prefixed(name, line)),
    )
    asyncio.run(supervisor.run())


def _write_config(config: ClusterConfig, run_dir: Path) -> Path:
    file = run_dir / _CONFIG_FILE
    file.write_text(config_as_toml(config), encoding="utf-8")
    return file
