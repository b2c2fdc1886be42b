"""argparse types for numbers, with errors that name the expected range."""

import argparse
import math
from collections.abc import Callable


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def at_least(least: int) -> Callable[[str], int]:
    """Type of a whole number of at least `least`."""

    def parse(text: str) -> int:
        value = whole(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return parse


positive = at_least(1)
count = at_least(0)


def whole_within(least: int, most: int) -> Callable[[str], int]:
    """Type of a whole number in [least, most]."""

    def parse(text: str) -> int:
        value = whole(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text}")
        return value

    return parse


def number_above(bound: float, most: float = math.inf) -> Callable[[str], float]:
    """Type of a finite number in (bound, most]."""

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
"""Type of a finite number above 0."""


def three_counts(form: str) -> Callable[[str], tuple[int, int, int]]:
    """Type of three whole numbers of at least 0, separated by commas; `form` names them in errors."""

    def parse(text: str) -> tuple[int, int, int]:
        try:
            first, second, third = (count(part) for part in text.split(","))
        except (ValueError, argparse.ArgumentTypeError):
            raise argparse.ArgumentTypeError(
                f"expected {form}, three whole numbers of at least 0, got {text!r}"
            ) from None
        return first, second, third

    return parse
