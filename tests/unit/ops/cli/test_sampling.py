"""The options of `kvferry infer` accept exactly the values that the router accepts."""

import argparse
import math

import pytest

from kvferry.common.base.errors import ConfigError, RequestInvalidError
from kvferry.ops.cli.sampling import _OPTIONS, Parameters, add_sampling_options, new_tokens, sampling_parameters
from kvferry.router.http.parameters import SEED_MAX, read_parameters

VALUES = ("-1", "0", "1", "2", "5", "6", "3600", "3601", "2147483647", "2147483648", f"{SEED_MAX}", f"{SEED_MAX + 1}")
NUMBERS = ("0.5", "1e-06", "1e-05", "1.5", "nan", "inf", "-0.5")
KINDS = {option.name: option.kind for option in _OPTIONS} | {"max_new_tokens": new_tokens}


def parsed(*words: str) -> Parameters:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_sampling_options(parser)
    return sampling_parameters(parser.parse_args(words))


def router_accepts(name: str, text: str) -> bool:
    value = float(text) if text in NUMBERS else int(text)
    if isinstance(value, float) and not math.isfinite(value):
        return False  # not in JSON
    try:
        read_parameters({name: value}, "parameters")
    except RequestInvalidError:
        return False
    return True


def option_accepts(name: str, text: str) -> bool:
    try:
        KINDS[name](text)
    except argparse.ArgumentTypeError:
        return False
    return True


@pytest.mark.parametrize("name", KINDS)
def test_an_option_accepts_what_the_router_accepts(name: str):
    for text in VALUES + NUMBERS:
        assert option_accepts(name, text) == router_accepts(name, text), text


def test_only_given_options_are_sent():
    assert parsed() == {"max_new_tokens": 20}
    assert parsed("--no-do-sample", "--seed", "3") == {"max_new_tokens": 20, "do_sample": False, "seed": 3}
    assert parsed("--do-sample", "--top-k", "3")["do_sample"] is True


@pytest.mark.parametrize("option", ["--temperature", "--top-k", "--top-p"])
def test_an_option_without_effect_is_rejected(option: str):
    with pytest.raises(ConfigError, match=f"{option}: has no effect with --no-do-sample"):
        parsed("--no-do-sample", option, "1")
