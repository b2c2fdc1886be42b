"""Options that several commands share: where the configuration comes from, and showing it."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from kvferry.common.config.docs import config_as_toml
from kvferry.common.config.load import Override, load_config, parse_override
from kvferry.common.config.schema import ClusterConfig


def add_config_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """--config, --set and --print-config."""
    parser.add_argument("--config", type=Path, metavar="FILE", required=required, help="the cluster's TOML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="SECTION.KEY=VALUE",
        help="override one key of the file; may be repeated, the last one wins",
    )
    parser.add_argument("--print-config", action="store_true", help="print the resulting configuration and end")


def read_config(args: argparse.Namespace, flags: Iterable[Override] = ()) -> ClusterConfig:
    """The configuration that the command line asks for; ConfigError when it is wrong. `--set` wins over `flags`."""
    return load_config(args.config, [*flags, *(parse_override(text) for text in args.settings)])


def printed(args: argparse.Namespace, config: ClusterConfig) -> bool:
    """Whether --print-config was given; then it is done."""
    if args.print_config:
        sys.stdout.write(config_as_toml(config))
    return bool(args.print_config)
