"""What is wrong with a body that is no JSON, and where, in words for whoever sent it. Pure.

The decoder's own words are kept, but for two: it says of `foo` that the text was cut off, since `false` begins like it,
and of `fooooo` that a later letter is wrong.
"""

import json
import re

import msgspec

_PREFIX = "JSON is malformed: "
_TRUNCATED = "Input data was truncated"
_MISLEADING = (_TRUNCATED, "invalid character")
_ENDS = "it ends too early"
_SHOWN_CHARS = 20
_SMALL_BYTES = 65_536
"""The second decoder holds the event loop for as long as it runs."""
_WORD = re.compile(r"\s*([^\s,:\[\]{}]+|\S)")


def json_fault(text: bytes | bytearray, error: msgspec.DecodeError, *, is_whole: bool) -> str:
    """A few words on `text`, which the decoder refused with `error`. Places in what is not whole would mislead."""
    said = str(error).removeprefix(_PREFIX)
    if is_whole and said.startswith(_MISLEADING) and len(text) <= _SMALL_BYTES:
        said = _second_opinion(text) or said
    said = _ENDS if said == _TRUNCATED else said
    return said if is_whole else without_place(said)


def without_place(said: str) -> str:
    """The decoder's words without the number of the byte."""
    return said.removeprefix(_PREFIX).partition(" (byte ")[0]


def _second_opinion(text: bytes | bytearray) -> str:
    """What another decoder, slower and laxer than the first, finds wrong; empty where it has nothing better to say."""
    try:
        json.loads(text.decode(), parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        word = _WORD.match(error.doc, error.pos)
        if word is None or error.msg.startswith("Unterminated"):
            return f"{_ENDS} (after {len(text)} bytes)"
        if error.msg == "Expecting value":
            place = len(error.doc[: error.pos].encode())
            return f"no value begins with {word[1][:_SHOWN_CHARS]!r} (byte {place})"
    except (ValueError, RecursionError):
        pass
    return ""
