"""Numbers on the command line: argparse types that say what was expected."""

import argparse
import math
from collections.abc import Callable


def whole(text: str) -> int:
    """Any whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def at_least(least: int) -> Callable[[str], int]:
    """A whole number from `least` on."""

    def parse(text: str) -> int:
        value = whole(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return parse


positive = at_least(1)
count = at_least(0)


def whole_within(least: int, most: int) -> Callable[[str], int]:
    """A whole number in [least, most]."""

    def parse(text: str) -> int:
        value = whole(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text}")
        return value

    return parse


def number_above(bound: float, most: float = math.inf) -> Callable[[str], float]:
    """A number in (bound, most], and not endless."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        if not bound < value <= most or math.isinf(value):
            up_to = f" and at most {most:g}" if most < math.inf else ""
            raise argparse.ArgumentTypeError(f"expected a number above {bound:g}{up_to}, got {text}")
        return value

    return parse


above_zero = number_above(0)
"""A number above 0, and not endless."""


def three_counts(form: str) -> Callable[[str], tuple[int, int, int]]:
    """Three numbers from 0 on with commas between; `form` is what a message calls them."""

    def parse(text: str) -> tuple[int, int, int]:
        try:
            first, second, third = (count(part) for part in text.split(","))
        except (ValueError, argparse.ArgumentTypeError):
            raise argparse.ArgumentTypeError(f"expected {form}, three numbers from 0 on, got {text!r}") from None
        return first, second, third

    return parse
