"""How a text that somebody else wrote is shown in an error: on one line, and short. Pure."""

_MOST_CHARS = 60


def shown(text: str, most_chars: int = _MOST_CHARS) -> str:
    """The text, cut, with what cannot be printed as escapes."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= most_chars else text[:most_chars] + "..."
