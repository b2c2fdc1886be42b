"""Decodes a large JSON body that is not large because of its token ids: keeps what the API reads, skips the rest. Pure.

Building a Python object for each of some million values that nobody asked for takes seconds; skipping them in C takes
a twentieth of that. What is too large to be right anyway becomes OVERSIZED.
"""

from collections.abc import Callable

import msgspec
from msgspec import Raw

SMALL_BYTES = 65_536
"""A value of this size is decoded as it is."""
_ANYTHING = msgspec.json.Decoder(object)
_INTEGERS = msgspec.json.Decoder(list[int | str])
"""Strings too: one may stand for a run that was cut out."""
_SINGLE = msgspec.json.Decoder(tuple[Raw])

_Reader = Callable[[Raw], object]


class Oversized:
    """Stands for a JSON value that is larger than any value allowed in its place."""


OVERSIZED = Oversized()


class _Parameters(msgspec.Struct):
    temperature: Raw = Raw(b"")
    top_k: Raw = Raw(b"")
    top_p: Raw = Raw(b"")
    do_sample: Raw = Raw(b"")
    seed: Raw = Raw(b"")
    repetition_penalty: Raw = Raw(b"")
    max_new_tokens: Raw = Raw(b"")
    watermark: Raw = Raw(b"")
    details: Raw = Raw(b"")
    batch_size: Raw = Raw(b"")
    priority: Raw = Raw(b"")
    timeout: Raw = Raw(b"")


class _Tensor(msgspec.Struct):
    name: Raw = Raw(b"")
    shape: Raw = Raw(b"")
    datatype: Raw = Raw(b"")
    data: Raw = Raw(b"")
    parameters: Raw = Raw(b"")


class _Output(msgspec.Struct):
    name: Raw = Raw(b"")


class _Body(msgspec.Struct):
    id: Raw = Raw(b"")
    inputs: Raw = Raw(b"")
    outputs: Raw = Raw(b"")
    parameters: Raw = Raw(b"")


def decode_skeleton(text: bytes | bytearray) -> object:
    """What decoding `text` would give, without the keys that no rule speaks of.

    Raises msgspec.DecodeError (malformed), UnicodeDecodeError, RecursionError.
    """
    text.decode()  # What is skipped is not looked at that closely.
    try:
        body = msgspec.json.decode(text, type=_Body)
    except msgspec.ValidationError:  # well-formed, and no object
        return _value(msgspec.json.decode(text, type=Raw))
    return _known(body, {"inputs": _inputs, "outputs": _outputs, "parameters": _parameters})


def _inputs(raw: Raw) -> object:
    return _single(raw, _tensor)


def _tensor(raw: Raw) -> object:
    return _fields(raw, _Tensor, {"shape": _integers, "data": _integers, "parameters": _parameters})


def _outputs(raw: Raw) -> object:
    return _single(raw, _output)


def _output(raw: Raw) -> object:
    return _fields(raw, _Output, {})


def _parameters(raw: Raw) -> object:
    return _fields(raw, _Parameters, {})


def _integers(raw: Raw) -> object:
    """An array of integers, or else nothing that would do. Long ones were cut out before, as a rule."""
    if len(raw) <= SMALL_BYTES:
        return _ANYTHING.decode(raw)
    try:
        return _INTEGERS.decode(raw)
    except msgspec.ValidationError:
        return OVERSIZED


def _fields(raw: Raw, kind: type[msgspec.Struct], readers: dict[str, _Reader]) -> object:
    """An object with the keys of `kind` alone."""
    if len(raw) <= SMALL_BYTES:
        return _ANYTHING.decode(raw)
    try:
        found = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        return _value(raw)
    return _known(found, readers)


def _known(found: msgspec.Struct, readers: dict[str, _Reader]) -> object:
    values = {name: getattr(found, name) for name in found.__struct_fields__}
    return {name: readers.get(name, _value)(value) for name, value in values.items() if len(value)}


def _single(raw: Raw, reader: _Reader) -> object:
    """An array with one element."""
    if len(raw) <= SMALL_BYTES:
        return _ANYTHING.decode(raw)
    try:
        (element,) = _SINGLE.decode(raw)
    except msgspec.ValidationError:
        return _value(raw)
    return [reader(element)]


def _value(raw: Raw) -> object:
    """A value that is read as it is: of the large ones only a string may be right."""
    if len(raw) <= SMALL_BYTES or bytes(raw)[:1] == b'"':
        return _ANYTHING.decode(raw)
    return OVERSIZED
