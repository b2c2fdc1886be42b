"""The parameters of a token request as options. Their ranges are the router's own, so nothing that it must refuse is
sent; their meaning is told in ops/docs/http.md as well."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvferry.common.base.errors import ConfigError
from kvferry.ops.cli.numbers import number_above, whole_within
from kvferry.router.http.parameters import INT32_MAX, LAST_PRIORITY, LONGEST_TIMEOUT_S, SEED_MAX, SMALLEST

Parameters = Mapping[str, int | float | bool]
"""The request's `parameters`, by the names of the API."""

new_tokens = whole_within(1, INT32_MAX)
"""How many tokens may be asked for."""


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
        f"a number above {SMALLEST:g}; above 1 the draw is more varied, below 1 surer of the likeliest (1.0)",
    ),
    _Option(
        "top_k",
        "K",
        whole_within(1, INT32_MAX),
        "draw among the K likeliest tokens, from 1 on; default: as the model's own settings say",
    ),
    _Option(
        "top_p",
        "P",
        number_above(SMALLEST, 1.0),
        f"draw among the likeliest tokens that together have this probability, above {SMALLEST:g} and at most 1 (1.0)",
    ),
    _Option(
        "seed",
        "S",
        whole_within(1, SEED_MAX),
        f"from 1 to {SEED_MAX}: the same request with the same seed draws the same tokens; default: another each time",
    ),
    _Option(
        "repetition_penalty",
        "R",
        number_above(0.0),
        "a number above 0; above 1 what was said already is less likely, also without sampling (1.0)",
    ),
    _Option("priority", "N", whole_within(1, LAST_PRIORITY), f"from 1, which goes first, to {LAST_PRIORITY} (5)"),
    _Option(
        "timeout",
        "S",
        whole_within(1, LONGEST_TIMEOUT_S),
        f"seconds for all of it: queue, prompt, generation; from 1 to {LONGEST_TIMEOUT_S} (600)",
    ),
)
_OF_DRAWS = ("temperature", "top_k", "top_p")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """All of them."""
    parser.add_argument(
        "--max-new-tokens",
        type=new_tokens,
        default=20,
        metavar="N",
        help="most tokens to generate, from 1 on; the server cuts it to its own limit (20)",
    )
    parser.add_argument(
        "--do-sample",
        action=argparse.BooleanOptionalAction,
        help="draw tokens, or take the likeliest each time; default: draw where --temperature, --top-k or --top-p is "
        "given, else as the model's own settings say",
    )
    for option in _OPTIONS:
        parser.add_argument(
            f"--{option.name.replace('_', '-')}", type=option.kind, metavar=option.metavar, help=option.help
        )


def sampling_parameters(args: argparse.Namespace) -> Parameters:
    """What was given. ConfigError where one option makes another one void."""
    given = dict(_given(args))
    if given.get("do_sample") is False:
        for name in _OF_DRAWS:
            if name in given:
                raise ConfigError(f"--{name.replace('_', '-')}: has no effect with --no-do-sample")
    return given


def _given(args: argparse.Namespace) -> Iterator[tuple[str, int | float | bool]]:
    for name in ("max_new_tokens", "do_sample", *(option.name for option in _OPTIONS)):
        value = getattr(args, name)
        if value is not None:
            yield name, value
