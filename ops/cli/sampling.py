"""The parameters of a token request as command-line options, with the router's own ranges (see ops/docs/http.md)."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvferry.common.base.errors import ConfigError
from kvferry.ops.cli.numbers import number_above, whole_within
from kvferry.router.http.parameters import INT32_MAX, LAST_PRIORITY, LONGEST_TIMEOUT_S, SEED_MAX, SMALLEST

Parameters = Mapping[str, int | float | bool]
"""The request's `parameters`, by the names of the API."""

new_tokens = whole_within(1, INT32_MAX)
"""Type of --max-new-tokens."""


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    metavar: str
    kind: Callable[[str], int | float]
    help: str


_OPTIONS = (
    _Option(
        "temperature",
        "T",
        number_above(SMALLEST),
        f"sampling temperature, above {SMALLEST:g}: higher is more random, lower more deterministic (1.0)",
    ),
    _Option(
        "top_k",
        "K",
        whole_within(1, INT32_MAX),
        "sample from the K most likely tokens, at least 1; default: from the model's generation config",
    ),
    _Option(
        "top_p",
        "P",
        number_above(SMALLEST, 1.0),
        f"sample from the most likely tokens whose probabilities add up to P, above {SMALLEST:g} and at most 1 (1.0)",
    ),
    _Option(
        "seed",
        "S",
        whole_within(1, SEED_MAX),
        f"random seed, 1 to {SEED_MAX}: the same request and seed give the same tokens; default: a random one",
    ),
    _Option(
        "repetition_penalty",
        "R",
        number_above(0.0),
        "above 0; above 1 tokens that occurred already become less likely, also without sampling (1.0)",
    ),
    _Option("priority", "N", whole_within(1, LAST_PRIORITY), f"1 (first) to {LAST_PRIORITY} (5)"),
    _Option(
        "timeout",
        "S",
        whole_within(1, LONGEST_TIMEOUT_S),
        f"seconds for the whole request: queue, prefill and decode; 1 to {LONGEST_TIMEOUT_S} (600)",
    ),
)
_SAMPLING_ONLY = ("temperature", "top_k", "top_p")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=new_tokens,
        default=20,
        metavar="N",
        help="most tokens to generate, at least 1; the server caps it at its own limit (20)",
    )
    parser.add_argument(
        "--do-sample",
        action=argparse.BooleanOptionalAction,
        help="sample tokens, or always take the most likely one; default: sample if --temperature, --top-k or --top-p "
        "is given, else from the model's generation config",
    )
    for option in _OPTIONS:
        parser.add_argument(
            f"--{option.name.replace('_', '-')}", type=option.kind, metavar=option.metavar, help=option.help
        )


def sampling_parameters(args: argparse.Namespace) -> Parameters:
    """The parameters that were given. Raises ConfigError for an option without effect."""
    given = dict(_given(args))
    if given.get("do_sample") is False:
        for name in _SAMPLING_ONLY:
            if name in given:
                raise ConfigError(f"--{name.replace('_', '-')}: has no effect with --no-do-sample; omit one of them")
    return given


def _given(args: argparse.Namespace) -> Iterator[tuple[str, int | float | bool]]:
    for name in ("max_new_tokens", "do_sample", *(option.name for option in _OPTIONS)):
        value = getattr(args, name)
        if value is not None:
            yield name, value
