"""Runs the announcement proxy: `python -m kvferry.ops.launcher.proxy_main CONFIG_FILE`."""

import logging
import sys
from pathlib import Path

from kvferry.common.base.errors import KvferryError
from kvferry.common.base.log import setup_logging
from kvferry.common.config.load import load_config
from kvferry.common.transport.proxy import run_proxy
from kvferry.common.transport.security import load_security

_LOG = logging.getLogger("kvferry.proxy")


def main(argv: list[str]) -> int:
    """Forward announcements until SIGTERM, or until the parent exits; returns the exit code."""
    config = load_config(Path(argv[0]))
    setup_logging(config.log, "proxy")
    discovery = config.discovery
    try:
        run_proxy(
            discovery.proxy_nodes,
            discovery.proxy_workers,
            allow_remote=discovery.allow_remote,
            security=load_security(config.security, "router"),
            on_bound=lambda nodes, workers: _LOG.info("nodes announce at %s, workers listen at %s", nodes, workers),
        )
    except KvferryError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
