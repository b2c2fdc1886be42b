"""`kvferry prefill` and `kvferry decode`: one node, in this process."""

import argparse
import os

from common.config.host import probe_host
from common.config.resolve import resolve_node
from common.config.schema import Role
from common.log import setup_logging
from ops.cli.errors import DONE
from ops.cli.options import add_config_options, printed, read_config

_ROLES: tuple[Role, ...] = ("prefill", "decode")
_HELP: dict[Role, str] = {"prefill": "start a node that computes prompts", "decode": "start a node that generates"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare both commands."""
    for role in _ROLES:
        parser = commands.add_parser(
            role, help=_HELP[role], description=f"{_HELP[role].capitalize()}. SIGTERM drains it."
        )
        add_config_options(parser, required=True)
        parser.set_defaults(run=run, role=role)


def run(args: argparse.Namespace) -> int:
    """Be a node until stopped."""
    role: Role = args.role
    config = read_config(args)
    if printed(args, config):
        return DONE
    setup_logging(config.log, config.role(role).name or role)
    threads = str(resolve_node(config, role, probe_host()).threads)
    # Read by torch's libraries when they are loaded, which is not yet.
    for variable, value in {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}.items():
        os.environ[variable] = value
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

    from ops.compose import run_decode, run_prefill
    from ops.model_choice import with_model

    config = with_model(config)
    return run_prefill(config) if role == "prefill" else run_decode(config)
