"""A number with its noun, for messages. Text only."""


def pluralize(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
