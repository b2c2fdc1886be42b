"""Options of every command that reads the cluster's configuration: --config, --set, --print-config."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from kvferry.common.config.docs import config_as_toml
from kvferry.common.config.load import Override, load_config, parse_override
from kvferry.common.config.schema import ClusterConfig


def add_config_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", required=required, help="the cluster's configuration, a TOML file"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="SECTION.KEY=VALUE",
        help="override a key of the configuration file; may be repeated, the last value of a key wins",
    )
    parser.add_argument("--print-config", action="store_true", help="print the resulting configuration and exit")


def read_config(args: argparse.Namespace, flags: Iterable[Override] = ()) -> ClusterConfig:
    """The configuration from --config, then `flags`, then --set. Raises ConfigError if it is wrong."""
    return load_config(args.config, [*flags, *(parse_override(text) for text in args.settings)])


def printed(args: argparse.Namespace, config: ClusterConfig) -> bool:
    """Print the configuration if --print-config was given; returns whether it was."""
    if args.print_config:
        sys.stdout.write(config_as_toml(config))
    return bool(args.print_config)
