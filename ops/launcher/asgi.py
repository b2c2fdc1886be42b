"""The application that gunicorn's workers load; creates the router of one worker, after the fork."""

import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.common.base.errors import ConfigError
from kvferry.common.base.log import setup_logging
from kvferry.common.config.load import load_config
from kvferry.ops.launcher.cluster import CONFIG_ENV
from kvferry.ops.launcher.metrics_files import reserve_metrics_files

if TYPE_CHECKING:
    from kvferry.router.http.shell import AsgiShell


def create_app() -> "AsgiShell":
    """The ASGI application, from the configuration file that KVFERRY_CONFIG names."""
    path = os.environ.get(CONFIG_ENV)
    if not path:
        raise ConfigError(f"{CONFIG_ENV} is not set; it must name the cluster's configuration file")
    config = load_config(Path(path))
    setup_logging(config.log, f"router-{os.getpid()}")
    if config.log.level != "debug":
        # Below warning, a worker logs its start and stop, as the arbiter does too, and that a socket is closed twice.
        for name in ("uvicorn.error", "gunicorn.error"):
            logging.getLogger(name).setLevel(logging.WARNING)
    reserve_metrics_files(os.environ, os.getpid())
    # Imported here: the prometheus client reads PROMETHEUS_MULTIPROC_DIR when it is imported.
    from kvferry.router.compose import build_app

    return build_app(config, version=version("kvferry"))
