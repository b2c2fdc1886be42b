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


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _at_least(1, text)


def count(text: str) -> int:
    """A whole number from 0 on."""
    return _at_least(0, text)


def above_zero(text: str) -> float:
    """A number above 0, and not endless."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def three_counts(form: str) -> Callable[[str], tuple[int, int, int]]:
    """Three numbers from 0 on with commas between; `form` is what a message calls them."""

    def parse(text: str) -> tuple[int, int, int]:
        try:
            first, second, third = (count(part) for part in text.split(","))
        except (ValueError, argparse.ArgumentTypeError):
            raise argparse.ArgumentTypeError(f"expected {form}, three numbers from 0 on, got {text!r}") from None
        return first, second, third

    return parse


def _at_least(least: int, text: str) -> int:
    value = whole(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
    return value
