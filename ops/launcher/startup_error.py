"""The line by which a child that is one of our commands says why it ends. Text only."""

import re

_ERROR_LINE = re.compile(r"kvferry [a-z]+: error: (.+)")


def startup_error(line: str) -> str:
    """What such a line says, without the command's name; empty for any other line."""
    match = _ERROR_LINE.fullmatch(line)
    return match[1] if match else ""
