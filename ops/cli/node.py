"""`kvferry prefill`, `kvferry decode` and `kvferry colocated`: run one node in this process."""

import argparse
import os

from kvferry.common.base.log import setup_logging
from kvferry.common.config.host import probe_host
from kvferry.common.config.resolve import resolve_node
from kvferry.common.config.schema import NODE_KINDS, ClusterConfig, NodeKind
from kvferry.ops.cli.errors import DONE
from kvferry.ops.cli.options import add_config_options, printed, read_config

_HELP: dict[NodeKind, str] = {
    "prefill": "start a prefill node, which computes prompts",
    "decode": "start a decode node, which generates tokens",
    "colocated": "start a colocated node: prefill and decode in one process",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for role in NODE_KINDS:
        parser = commands.add_parser(
            role, help=_HELP[role], description=f"{_HELP[role].capitalize()}. SIGTERM drains it and ends it."
        )
        add_config_options(parser, required=True)
        parser.set_defaults(run=run, role=role)


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal; returns the exit code."""
    role: NodeKind = args.role
    config = read_config(args)
    if printed(args, config):
        return DONE
    setup_logging(config.log, config.role(role).name or role)
    set_thread_variables(resolve_node(config, role, probe_host()).threads)
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

    from kvferry.ops.model_choice import with_model

    return _run_role(with_model(config), role)


def _run_role(config: ClusterConfig, role: NodeKind) -> int:
    """Imports the role that is asked for, after the thread variables have been set."""
    match role:
        case "prefill":
            from kvferry.prefill_node.node import run
        case "decode":
            from kvferry.decode_node.node import run
        case "colocated":
            from kvferry.ops.colocated_node import run
    return run(config)


def set_thread_variables(threads: int) -> None:
    """Set the environment variables that torch's libraries read when they are loaded. Must be called before that."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    # Idle OpenMP threads must not spin on a core that the native ops' threads or another node need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
