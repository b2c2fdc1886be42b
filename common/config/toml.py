"""Writing the little TOML that a configuration needs (the standard library only reads it). Pure."""

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
