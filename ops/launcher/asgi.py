"""What gunicorn's workers load: the router of this worker, made after the fork."""

import os
from pathlib import Path

from common.config.load import load_config
from common.errors import ConfigError
from common.log import setup_logging
from ops.launcher.cluster import CONFIG_ENV


def create_app() -> object:
    """The ASGI application of the configuration that the environment names."""
    from ops.compose import create_router_app

    path = os.environ.get(CONFIG_ENV)
    if not path:
        raise ConfigError(f"{CONFIG_ENV} is not set: it names the cluster's configuration file")
    config = load_config(Path(path))
    setup_logging(config.log, f"router-{os.getpid()}")
    return create_router_app(config)
