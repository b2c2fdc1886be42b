"""`kvferry serve`: runs a whole cluster on this machine."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from kvferry.common.base.log import setup_logging
from kvferry.common.config.load import Override
from kvferry.ops.cli.errors import DONE
from kvferry.ops.cli.numbers import whole
from kvferry.ops.cli.options import add_config_options, printed, read_config

_FLAGS = {
    "model_name": ("model", "name"),
    "prefill": ("serve", "prefill"),
    "decode": ("serve", "decode"),
    "colocated": ("serve", "colocated"),
    "workers": ("router", "workers"),
    "host": ("router", "host"),
    "port": ("router", "port"),
    "dtype": ("model", "dtype"),
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="start a cluster on this machine",
        description="Starts a router and nodes on this machine and prints `ready http://host:port model=NAME` when the "
        "cluster serves. Ctrl-C drains and stops it, a second Ctrl-C kills it.",
    )
    parser.add_argument(
        "--model", metavar="DIR_OR_GGUF", help="a HuggingFace directory or GGUF file; default: the small real model"
    )
    parser.add_argument(
        "--model-name", metavar="NAME", help="the model's name in URLs; default: name of the file or directory"
    )
    parser.add_argument(
        "--prefill",
        type=whole,
        metavar="N",
        help="number of prefill nodes, which compute prompts (1; 0 with --colocated)",
    )
    parser.add_argument(
        "--decode",
        type=whole,
        metavar="M",
        help="number of decode nodes, which generate tokens (1; 0 with --colocated)",
    )
    parser.add_argument(
        "--colocated", type=whole, metavar="U", help="number of colocated nodes: prefill and decode in one process (0)"
    )
    parser.add_argument("--workers", type=whole, metavar="W", help="number of the router's gunicorn workers (2)")
    parser.add_argument("--host", metavar="H", help="address to serve HTTP on (127.0.0.1)")
    parser.add_argument("--port", type=whole, metavar="P", help="port to serve HTTP on (1025); 0 picks a free one")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), help="type of weights, activations and KV cache (auto)"
    )
    add_config_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal."""
    config = read_config(args, overrides(args))
    if printed(args, config):
        return DONE
    setup_logging(config.log, "serve")
    from kvferry.common.models.checkpoint_precheck import check_model_files
    from kvferry.ops.launcher.serve import serve
    from kvferry.ops.model_choice import with_model

    config = with_model(config)
    check_model_files(Path(config.model.path))
    serve(config)
    return DONE


def overrides(args: argparse.Namespace) -> Iterator[Override]:
    """Configuration keys that the options set."""
    if args.model is not None:
        yield Override("model", "path", str(Path(args.model).expanduser().absolute()))
    for flag, (section, key) in _FLAGS.items():
        value = getattr(args, flag)
        if value is not None:
            yield Override(section, key, value)
