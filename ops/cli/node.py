"""`kvferry prefill`, `kvferry decode` and `kvferry colocated`: one node, in this process."""

import argparse
import os

from kvferry.common.base.log import setup_logging
from kvferry.common.config.host import probe_host
from kvferry.common.config.resolve import resolve_node
from kvferry.common.config.schema import NODE_KINDS, NodeKind
from kvferry.ops.cli.errors import DONE
from kvferry.ops.cli.options import add_config_options, printed, read_config

_HELP: dict[NodeKind, str] = {
    "prefill": "start a node that computes prompts",
    "decode": "start a node that generates",
    "colocated": "start a node that does both",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the commands."""
    for role in NODE_KINDS:
        parser = commands.add_parser(
            role, help=_HELP[role], description=f"{_HELP[role].capitalize()}. SIGTERM drains it."
        )
        add_config_options(parser, required=True)
        parser.set_defaults(run=run, role=role)


def run(args: argparse.Namespace) -> int:
    """Be a node until stopped."""
    role: NodeKind = args.role
    config = read_config(args)
    if printed(args, config):
        return DONE
    setup_logging(config.log, config.role(role).name or role)
    set_thread_variables(resolve_node(config, role, probe_host()).threads)
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

    from kvferry.ops.compose import run_role
    from kvferry.ops.model_choice import with_model

    config = with_model(config)
    return run_role(config, role)


def set_thread_variables(threads: int) -> None:
    """What torch's libraries read when they are loaded, which must not be yet."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    # A thread of theirs that waits must not keep a core from the native ops' threads, or from another node.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
