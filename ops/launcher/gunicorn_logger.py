"""gunicorn's and uvicorn's own lines, in the form that all others have."""

import logging
import os
from pathlib import Path

from gunicorn.config import Config
from gunicorn.glogging import Logger

from kvferry.common.base.log import make_handler
from kvferry.common.config.load import load_config
from kvferry.ops.launcher.cluster import CONFIG_ENV


class GunicornLogger(Logger):  # type: ignore[misc] # gunicorn has no types
    """Writes what gunicorn says through the project's formatter. The access log is the router's own."""

    def setup(self, cfg: Config) -> None:
        """Called by gunicorn at start and at reload."""
        super().setup(cfg)
        path = os.environ.get(CONFIG_ENV)
        config = load_config(Path(path) if path else None)
        self.error_log.handlers = [make_handler(config.log, "router")]
        self.error_log.setLevel(max(logging.getLevelName(config.log.level.upper()), logging.INFO))
