"""`kvferry router`: runs this host's router workers, and its announcement proxy if it has one."""

import argparse

from kvferry.common.base.log import setup_logging
from kvferry.ops.cli.errors import DONE
from kvferry.ops.cli.options import add_config_options, printed, read_config


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "router",
        help="start the router workers of this host",
        description="Starts gunicorn with the router's workers, and this host's announcement proxy if "
        "discovery.proxy_nodes is set; prints `listening http://host:port` when HTTP is served.",
    )
    add_config_options(parser, required=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal."""
    config = read_config(args)
    if printed(args, config):
        return DONE
    setup_logging(config.log, "router")
    from kvferry.ops.launcher.serve import serve_router

    serve_router(config)
    return DONE
