"""Writing the little TOML that a configuration needs (the standard library only reads it). Pure.

How a text that somebody else wrote is shown in an error: on one line, and short. Pure.
"""

import json
from collections.abc import Sequence

TomlScalar = str | int | float | bool
TomlValue = TomlScalar | Sequence["TomlValue"]


def toml_value(value: TomlValue) -> str:
    """One value in TOML syntax. Arrays on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    return "[" + ", ".join(toml_value(item) for item in value) + "]"


_MOST_CHARS = 60


def quote(text: str, most_chars: int = _MOST_CHARS) -> str:
    """The text, cut, with what cannot be printed as escapes."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= most_chars else text[:most_chars] + "..."
