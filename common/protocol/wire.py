"""Messages as frames and back: the only place that knows how a message looks on the wire. Does no IO.

Frame 0 is [version byte][type byte], frame 1 the header as JSON, then one raw frame for each field that `RAW_FIELDS`
names: token ids as little-endian uint32, KV bytes as they are. Whatever bytes come in, `decode` answers with an
`Envelope` or raises `ProtocolError`; nothing else. Header keys that this version does not know are ignored.
"""

import re
import sys
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import orjson

from kvferry.common.base.errors import ProtocolError
from kvferry.common.base.ids import Incarnation
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import (
    MESSAGE_TYPES,
    NESTED_SPEC,
    PROTOCOL_VERSION,
    RAW_FIELDS,
    Envelope,
    Message,
    Piece,
)
from kvferry.common.protocol.request_spec import RequestSpec

Frame = bytes | memoryview
"""One frame of a message."""

_INCARNATION = re.compile(r"[0-9a-f]{32}")
_HEAD_FRAMES = 2
_ID_BYTES = 4
_REASON_CHARS = 300
"""A schema error may quote what the peer sent; a log line must not grow with that."""


def encode(envelope: Envelope, limits: Limits) -> list[Frame]:
    """Frames of an envelope. KV bytes are not copied; token ids are. Raises ProtocolError beyond the limits."""
    message = envelope.message
    kind = type(message)
    if MESSAGE_TYPES.get(kind.TYPE) is not kind:
        raise ProtocolError(f"{kind.__name__} is not a message of the protocol")
    header = _encode_header(envelope)
    if len(header) > limits.header_max_bytes:
        raise ProtocolError(f"{kind.__name__}: header of {len(header)} bytes, at most {limits.header_max_bytes} may be")
    frames: list[Frame] = [bytes((PROTOCOL_VERSION, kind.TYPE)), header]
    nested = NESTED_SPEC.get(kind)
    carrier = message if nested is None else getattr(message, nested)
    if raw_names := _raw_names(kind):
        raw = [_raw_frame(getattr(carrier, name)) for name in raw_names]
        _check_raw_size(kind, raw, limits)
        frames += raw
    return frames


def decode(frames: Sequence[Frame], limits: Limits) -> Envelope:
    """The envelope that the frames stand for, checked against the schema.

    A `Piece` keeps a reference to its data frame instead of a copy. Raises ProtocolError with what is wrong and where.
    """
    kind = _message_type(frames)
    raw = frames[_HEAD_FRAMES:]
    if len(raw) != len(_raw_names(kind)):
        raise ProtocolError(f"{kind.__name__}: {len(frames)} frames, expected {_HEAD_FRAMES + len(_raw_names(kind))}")
    header = _parse_header(kind, frames[1], limits)
    sender = _incarnation(kind, header, "from")
    receiver = _incarnation(kind, header, "to") if header.get("to") != "" else Incarnation("")
    try:
        if not raw:
            return Envelope(sender, receiver, msgspec.convert(header, kind))
        fields = msgspec.structs.asdict(msgspec.convert(header, _header_type(kind)))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{kind.__name__}: header: {str(error)[:_REASON_CHARS]}") from None
    decoded = _decode_raw(kind, raw, limits)
    if (nested := NESTED_SPEC.get(kind)) is None:
        fields.update(decoded)
    else:
        fields[nested] = RequestSpec(**msgspec.structs.asdict(fields[nested]), **decoded)
    return Envelope(sender, receiver, kind(**fields))


def _raw_names(kind: type[Message]) -> tuple[str, ...]:
    return RAW_FIELDS.get(RequestSpec if kind in NESTED_SPEC else kind, ())


def _encode_header(envelope: Envelope) -> bytes:
    message = envelope.message
    kind = type(message)
    if (nested := NESTED_SPEC.get(kind)) is not None:
        fields = msgspec.structs.asdict(message)
        fields[nested] = _without_raw(fields[nested], RAW_FIELDS[RequestSpec])
    elif kind in RAW_FIELDS:
        fields = _without_raw(message, RAW_FIELDS[kind])
    else:
        fields = msgspec.to_builtins(message)
    fields["from"] = envelope.sender
    fields["to"] = envelope.receiver
    try:
        return orjson.dumps(fields, default=msgspec.to_builtins)
    except orjson.JSONEncodeError as error:
        # A lone surrogate in a string, an integer beyond 64 bits: a client's input can lead here.
        raise ProtocolError(f"{type(envelope.message).__name__}: cannot be sent: {error}") from None


def _without_raw(struct: msgspec.Struct, raw_names: tuple[str, ...]) -> dict[str, Any]:
    """The fields, shallow. msgspec would turn the raw ones into base64, or refuse them."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__ if name not in raw_names}


def _raw_frame(value: "array[int] | Frame") -> Frame:
    if not isinstance(value, array):
        return value
    if value.typecode != "I":
        raise ProtocolError(f"token ids are an array of typecode 'I', not {value.typecode!r}")
    # A copy: an exported array could not grow while ZeroMQ holds the frame.
    return _little_endian(value).tobytes()


def _little_endian(ids: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids


def _message_type(frames: Sequence[Frame]) -> type[Message]:
    if len(frames) < _HEAD_FRAMES:
        raise ProtocolError(f"{len(frames)} frames, at least 2 are needed")
    head = bytes(frames[0][:3])
    if len(head) != 2:
        raise ProtocolError("the first frame is not two bytes, version and type")
    if head[0] != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {head[0]}, this process speaks {PROTOCOL_VERSION}")
    kind = MESSAGE_TYPES.get(head[1])
    if kind is None:
        raise ProtocolError(f"unknown message type {head[1]}")
    return kind


def _parse_header(kind: type[Message], frame: Frame, limits: Limits) -> dict[str, Any]:
    size = _num_bytes(frame)
    if size > limits.header_max_bytes:
        raise ProtocolError(f"{kind.__name__}: header of {size} bytes, at most {limits.header_max_bytes} may be")
    try:
        header = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"{kind.__name__}: header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ProtocolError(f"{kind.__name__}: header is not a JSON object")
    return header


def _incarnation(kind: type[Message], header: dict[str, Any], key: str) -> Incarnation:
    value = header.get(key)
    if not isinstance(value, str) or not _INCARNATION.fullmatch(value):
        raise ProtocolError(f"{kind.__name__}: header: `{key}` is not an incarnation of 32 hex digits")
    return Incarnation(value)


def _decode_raw(kind: type[Message], raw: Sequence[Frame], limits: Limits) -> dict[str, Any]:
    _check_raw_size(kind, raw, limits)
    if kind is Piece:
        return {"data": raw[0]}
    return {name: _decode_ids(kind, name, frame) for name, frame in zip(_raw_names(kind), raw, strict=True)}


def _check_raw_size(kind: type[Message], raw: Sequence[Frame], limits: Limits) -> None:
    bound = limits.piece_max_bytes if kind is Piece else limits.job_token_ids_max_bytes
    size = sum(_num_bytes(frame) for frame in raw)
    if size > bound:
        raise ProtocolError(f"{kind.__name__}: raw frames of {size} bytes, at most {bound} may be")


def _decode_ids(kind: type[Message], name: str, frame: Frame) -> "array[int]":
    size = _num_bytes(frame)
    if size % _ID_BYTES:
        raise ProtocolError(f"{kind.__name__}: {name}: {size} bytes are no whole number of token ids")
    ids = array("I")
    ids.frombytes(frame)
    return _little_endian(ids)


def _num_bytes(frame: Frame) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


@cache
def _header_type(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The schema of a message, or of a RequestSpec, without its raw fields, which msgspec could not describe."""
    raw_names = RAW_FIELDS.get(kind, ())
    defaults = dict(zip(reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False))
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name in kind.__struct_fields__:
        if name in raw_names:
            continue
        annotation = kind.__annotations__[name]
        if annotation is RequestSpec:
            annotation = _header_type(RequestSpec)
        default = defaults.get(name, msgspec.NODEFAULT)
        fields.append((name, annotation) if default is msgspec.NODEFAULT else (name, annotation, default))
    return msgspec.defstruct(f"{kind.__name__}Header", fields, kw_only=True, frozen=True)
