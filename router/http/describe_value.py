"""How a client's own value is shown in an error text: short, whatever was sent. Pure."""

_LONGEST_STRING = 40
_LARGEST_INT = 10**20


def describe_value(value: object) -> str:
    """A few words for a decoded JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < _LARGEST_INT else "a huge integer"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= _LONGEST_STRING else f"a string of {len(value)} characters"
    if isinstance(value, list):
        return _describe_list(value)
    return "an object" if isinstance(value, dict) else "a very large value"


def _describe_list(values: list[object]) -> str:
    if len(values) <= 4 and all(not isinstance(value, list | dict | str) for value in values):
        return "[" + ", ".join(describe_value(value) for value in values) + "]"
    return f"an array of {len(values)}"
