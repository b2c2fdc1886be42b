"""gunicorn's configuration, read from the file that KVFERRY_CONFIG names. `kvferry serve` and `kvferry router` use it.

By hand, without `kvferry router`:

    export KVFERRY_CONFIG=cluster.toml
    python -P -m kvferry.ops.launcher.gunicorn_main -c python:kvferry.ops.launcher.gunicorn_conf \
        "kvferry.ops.launcher.asgi:create_app()"

(or `gunicorn` with the same arguments, which also imports from the current folder). Nodes are found through static
endpoints (router.nodes) or a proxy of discovery.proxy_nodes: `python -m kvferry.ops.launcher.proxy_main cluster.toml`.
For `/metrics` over all workers PROMETHEUS_MULTIPROC_DIR must name an empty directory.
"""

import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from gunicorn.config import Config
from gunicorn.glogging import Logger

from kvferry.common.base.log import make_handler
from kvferry.common.base.parent_death_signal import die_with_parent
from kvferry.common.config.load import load_config
from kvferry.common.config.schema import ClusterConfig
from kvferry.ops.launcher.cluster import CONFIG_ENV, WORKER_CLASS
from kvferry.ops.launcher.metrics_files import forget_gauges
from kvferry.ops.launcher.reload import new_workers_first

if TYPE_CHECKING:
    from gunicorn.arbiter import Arbiter
    from gunicorn.workers.base import Worker


def _load() -> ClusterConfig:
    path = os.environ.get(CONFIG_ENV)
    return load_config(Path(path) if path else None)


class GunicornLogger(Logger):  # type: ignore[misc] # gunicorn has no types
    """Writes gunicorn's and uvicorn's lines through the project's formatter. The router has its own access log."""

    def setup(self, cfg: Config) -> None:
        """Called by gunicorn at start and at reload."""
        super().setup(cfg)
        log = _load().log
        self.error_log.handlers = [make_handler(log, "router")]
        self.error_log.setLevel(max(logging.getLevelName(log.level.upper()), logging.INFO))


_config = _load()
_host = f"[{_config.router.host}]" if ":" in _config.router.host else _config.router.host

bind = f"{_host}:{_config.router.port}"
backlog = _config.router.backlog
workers = _config.router.workers
worker_class = WORKER_CLASS
preload_app = False  # sockets are made after the fork
max_requests = 0  # replacing a worker would cut its streams
timeout = 60
# The router ends its streams within the drain; this kills a worker that does not.
graceful_timeout = int(_config.timers.worker_drain_s) + 5
# Longer than proxies and clients keep a connection. The timer runs before the socket is read: a worker that was stopped
# for a while would otherwise close, as idle, a connection with a request in its buffer.
keepalive = 75
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a liveness update must not wait for a disk
control_socket_disable = True  # it would be one file in the home directory, shared by all instances
accesslog = None
logger_class = GunicornLogger


def on_starting(server: "Arbiter") -> None:
    """In the arbiter, before the first fork: makes a reload stop the old workers only when the new ones serve, and
    makes stop signals end a worker that has just been forked.

    A new worker inherits the arbiter's handlers until it installs its own: they queue a signal that the worker never
    reads, and the arbiter sends SIGTERM only once.
    """
    stops = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}

    def in_child() -> None:
        for number in stops:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, stops),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, stops),
        after_in_child=in_child,
    )
    new_workers_first(server)


def post_fork(server: "Arbiter", worker: "Worker") -> None:
    """In the new worker: ask the kernel to kill it when the arbiter dies."""
    if not die_with_parent(server.pid, signal.SIGKILL):
        os._exit(1)


def child_exit(server: "Arbiter", worker: "Worker") -> None:
    """In the arbiter: drop the gauges of a worker that exited."""
    with contextlib.suppress(OSError):
        forget_gauges(os.environ, worker.pid)
