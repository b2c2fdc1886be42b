"""gunicorn's configuration (`-c python:kvferry.ops.launcher.gunicorn_conf`), from the file that KVFERRY_CONFIG names.

Without the launcher: `KVFERRY_CONFIG=cluster.toml gunicorn -c python:kvferry.ops.launcher.gunicorn_conf
"kvferry.ops.launcher.asgi:create_app()"`; discovery then needs a proxy or static endpoints of its own.
"""

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.common.base.parent_death_signal import die_with_parent
from kvferry.common.config.load import load_config
from kvferry.ops.launcher.cluster import CONFIG_ENV, WORKER_CLASS
from kvferry.ops.launcher.gunicorn_logger import GunicornLogger
from kvferry.ops.launcher.metrics_files import forget_gauges
from kvferry.ops.launcher.reload import new_workers_first

if TYPE_CHECKING:
    from gunicorn.arbiter import Arbiter
    from gunicorn.workers.base import Worker

_path = os.environ.get(CONFIG_ENV)
_config = load_config(Path(_path) if _path else None)
_host = f"[{_config.router.host}]" if ":" in _config.router.host else _config.router.host

bind = f"{_host}:{_config.router.port}"
backlog = _config.router.backlog
workers = _config.router.workers
worker_class = WORKER_CLASS
preload_app = False  # sockets are made after the fork
max_requests = 0  # a worker that is replaced loses its streams
timeout = 60
# The router ends its streams itself within the drain; this only catches a worker that does not.
graceful_timeout = int(_config.timers.worker_drain_s) + 5
# Longer than proxies and clients keep a connection. The timer runs before the socket is read: a worker that was frozen
# would close, as idle, a connection on which a request has come meanwhile.
keepalive = 75
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a heartbeat must not wait for a disk
control_socket_disable = True  # it would lie in the home directory, shared by all instances
accesslog = None
logger_class = GunicornLogger


def on_starting(server: "Arbiter") -> None:
    """In the arbiter, before it forks: a reload ends old workers when the new ones serve, and a signal that ends a
    worker ends it from its first moment on.

    A new worker has the arbiter's handlers until it sets its own: they note a signal in a queue that nobody reads
    there, and the arbiter sends SIGTERM once.
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
    """In the new worker: it must not outlive the arbiter."""
    if not die_with_parent(server.pid, signal.SIGKILL):
        os._exit(1)


def child_exit(server: "Arbiter", worker: "Worker") -> None:
    """In the arbiter: the gauges of a worker that is gone do not count any more."""
    with contextlib.suppress(OSError):
        forget_gauges(os.environ, worker.pid)
