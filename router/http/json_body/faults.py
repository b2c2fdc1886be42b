"""Wording of faults in a JSON body: what is wrong with malformed text, and how a client's value is quoted. Pure."""

import json
import re

import msgspec

_PREFIX = "JSON is malformed: "
_TRUNCATED = "Input data was truncated"
_MISLEADING = (_TRUNCATED, "invalid character")
"""The decoder reports `foo` as truncated, since `false` begins like it, and a later letter of `fooooo` as wrong."""
_ENDS = "it ends too early"
_QUOTED_CHARS = 20
_SMALL_BYTES = 65_536
"""Larger texts get no second opinion: `json` holds the event loop for as long as it runs."""
_WORD = re.compile(r"\s*([^\s,:\[\]{}]+|\S)")
_LONGEST_STRING = 40
_LARGEST_INT = 10**20


def json_fault(text: bytes | bytearray, error: msgspec.DecodeError, *, is_whole: bool) -> str:
    """What is wrong with `text`, which the decoder refused with `error`, and where.

    `is_whole` is False when long arrays were cut out of the text: positions in it would mislead and are left out.
    """
    message = str(error).removeprefix(_PREFIX)
    if is_whole and message.startswith(_MISLEADING) and len(text) <= _SMALL_BYTES:
        message = _second_opinion(text) or message
    message = _ENDS if message == _TRUNCATED else message
    return message if is_whole else without_position(message)


def without_position(message: str) -> str:
    """The decoder's message without the byte position."""
    return message.removeprefix(_PREFIX).partition(" (byte ")[0]


def _second_opinion(text: bytes | bytearray) -> str:
    """The message of the standard decoder, which is slower and laxer; empty if it has nothing better to report."""
    try:
        json.loads(text.decode(), parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        word = _WORD.match(error.doc, error.pos)
        if word is None or error.msg.startswith("Unterminated"):
            return f"{_ENDS} (after {len(text)} bytes)"
        if error.msg == "Expecting value":
            position = len(error.doc[: error.pos].encode())
            return f"no value begins with {word[1][:_QUOTED_CHARS]!r} (byte {position})"
    except (ValueError, RecursionError):
        pass
    return ""


def describe_value(value: object) -> str:
    """A decoded JSON value in a few words, however large it is."""
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
        if len(value) <= 4 and all(not isinstance(element, list | dict | str) for element in value):
            return "[" + ", ".join(map(describe_value, value)) + "]"
        return f"an array of {len(value)}"
    return "an object" if isinstance(value, dict) else "a very large value"
