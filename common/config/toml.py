"""Writes the subset of TOML that a configuration needs, and quotes foreign text in errors. Pure.

The standard library only reads TOML.
"""

import json
from collections.abc import Sequence

TomlScalar = str | int | float | bool
TomlValue = TomlScalar | Sequence["TomlValue"]

_MAX_QUOTED_CHARS = 60


def toml_value(value: TomlValue) -> str:
    """One value in TOML syntax, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except for DEL, which TOML requires to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    return "[" + ", ".join(toml_value(item) for item in value) + "]"


def quote(text: str, max_chars: int = _MAX_QUOTED_CHARS) -> str:
    """The text for an error message: non-printable characters escaped, cut to `max_chars`."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= max_chars else text[:max_chars] + "..."
