"""What gunicorn's workers load: the router of this worker, made after the fork."""

import logging
import os
from pathlib import Path

from kvferry.common.base.errors import ConfigError
from kvferry.common.base.log import setup_logging
from kvferry.common.config.load import load_config
from kvferry.ops.launcher.cluster import CONFIG_ENV
from kvferry.ops.launcher.metrics_files import reserve_metrics_files


def create_app() -> object:
    """The ASGI application of the configuration that the environment names."""
    path = os.environ.get(CONFIG_ENV)
    if not path:
        raise ConfigError(f"{CONFIG_ENV} is not set: it names the cluster's configuration file")
    config = load_config(Path(path))
    setup_logging(config.log, f"router-{os.getpid()}")
    if config.log.level != "debug":
        # In a worker these tell of its life only, which the arbiter does too, and of a socket that is closed twice.
        for name in ("uvicorn.error", "gunicorn.error"):
            logging.getLogger(name).setLevel(logging.WARNING)
    reserve_metrics_files(os.environ, os.getpid())
    from kvferry.ops.compose import (
        create_router_app,  # it imports the prometheus client, which looks at the environment then
    )

    return create_router_app(config)
