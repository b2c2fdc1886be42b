"""Whatever bytes come, `decode` answers with an envelope or with ProtocolError."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.base.errors import ProtocolError
from kvferry.common.base.ids import Incarnation
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import (
    MESSAGE_TYPES,
    NESTED_SPEC,
    PROTOCOL_VERSION,
    RAW_FIELDS,
    Envelope,
    Gone,
    Job,
    Message,
    Piece,
    Reserve,
    Status,
)
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.wire import decode, encode
from tests.wire.samples import SAMPLES, envelope

LIMITS = Limits(header_max_bytes=4096, job_token_ids_max_bytes=1024, piece_max_bytes=512)
VALID = [[bytes(frame) for frame in encode(envelope(message), LIMITS)] for message in SAMPLES]
TYPES = st.sampled_from(sorted(MESSAGE_TYPES))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def decodes_or_refuses(frames: list[bytes]) -> None:
    try:
        back = decode(frames, LIMITS)
    except ProtocolError:
        return
    assert isinstance(back, Envelope)
    encode(back, LIMITS)  # what was let in can go out again


@given(st.lists(st.binary(max_size=64), max_size=5))
def test_random_frames(frames: list[bytes]):
    decodes_or_refuses(frames)


@given(TYPES, st.binary(max_size=64), st.lists(st.binary(max_size=32), max_size=3))
def test_random_bytes_behind_a_right_first_frame(kind: int, header: bytes, raw: list[bytes]):
    decodes_or_refuses([bytes((PROTOCOL_VERSION, kind)), header, *raw])


@given(st.sampled_from(VALID), st.randoms(use_true_random=False))
def test_valid_frames_with_flipped_cut_and_added_bytes(frames: list[bytes], rng: random.Random):
    mutated = [bytearray(frame) for frame in frames]
    for _ in range(rng.randint(1, 4)):
        frame = rng.choice(mutated)
        position = rng.randint(0, len(frame))
        action = rng.randrange(3)
        if action == 0 and position < len(frame):
            frame[position] ^= 1 << rng.randrange(8)
        elif action == 1:
            del frame[position : position + rng.randint(1, 8)]
        else:
            frame[position:position] = rng.randbytes(rng.randint(1, 4))
    if rng.random() < 0.2:
        mutated.insert(rng.randint(0, len(mutated)), bytearray(rng.randbytes(3)))
    decodes_or_refuses([bytes(frame) for frame in mutated])


@given(st.sampled_from(VALID), st.data())
def test_valid_headers_with_values_of_another_type(frames: list[bytes], data: st.DataObject):
    header = json.loads(frames[1])
    key = data.draw(st.sampled_from(sorted(header)))
    header[key] = data.draw(JSON)
    decodes_or_refuses([frames[0], json.dumps(header).encode(), *frames[2:]])


def test_deep_nesting_is_refused():
    decodes_or_refuses([bytes((PROTOCOL_VERSION, Status.TYPE)), b"[" * 4000])
    decodes_or_refuses([bytes((PROTOCOL_VERSION, Status.TYPE)), b'{"a":' * 700 + b"1" + b"}" * 700])


def frames_of(kind: type[Message]) -> list[bytes]:
    return next(frames for frames in VALID if frames[0][1] == kind.TYPE)


def refusal(frames: list[bytes], limits: Limits = LIMITS) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(frames, limits)
    return str(caught.value)


def test_refusals_say_what_and_where():
    head, header, *raw = frames_of(Job)
    fields = json.loads(header)

    def with_fields(**changed: object) -> list[bytes]:
        return [head, json.dumps(fields | changed).encode(), *raw]

    assert "at least 2" in refusal([head])
    assert "not two bytes" in refusal([head + b"x", header, *raw])
    assert "protocol version 9" in refusal([b"\x09\x08", header, *raw])
    assert "unknown message type 250" in refusal([bytes((PROTOCOL_VERSION, 250)), header, *raw])
    assert refusal([head, header]) == "Job: 2 frames, expected 4"
    assert "Job: header is not JSON" in refusal([head, b"{", *raw])
    assert "not a JSON object" in refusal([head, b"[]", *raw])
    assert "`from`" in refusal(with_fields(**{"from": "g" * 32}))
    assert "`to`" in refusal(with_fields(to="a1" * 16 + "\n"))
    assert "`to`" in refusal(with_fields(to=None))
    assert "$.attempt" in refusal(with_fields(attempt="2"))
    assert "$.attempt" in refusal(with_fields(attempt=True))
    assert "$.candidates[0].incarnation" in refusal(
        with_fields(candidates=[{"incarnation": "zz", "name": "x", "endpoint": "tcp://a:1"}])
    )
    assert "prompt_token_ids: 3 bytes" in refusal([head, header, b"abc", raw[1]])


def test_a_refusal_does_not_quote_at_length():
    head, header = frames_of(Gone)
    fields = json.loads(header) | {"reason": "x" * 3000}
    assert len(refusal([head, json.dumps(fields).encode()])) < 400


@pytest.mark.parametrize("kind", [Job, Piece])
def test_sizes_are_limited_both_ways(kind: type[Message]):
    frames = frames_of(kind)
    message = next(message for message in SAMPLES if type(message) is kind)
    size = sum(map(len, frames[2:]))
    bound = "piece_max_bytes" if kind is Piece else "job_token_ids_max_bytes"
    right = Limits(header_max_bytes=len(frames[1]), **{bound: size})
    assert decode(frames, right) == envelope(message)
    assert encode(envelope(message), right) == frames
    for small in (
        Limits(header_max_bytes=len(frames[1]) - 1, **{bound: size}),
        Limits(header_max_bytes=len(frames[1]), **{bound: size - 1}),
    ):
        assert "at most" in refusal(frames, small)
        with pytest.raises(ProtocolError, match="at most"):
            encode(envelope(message), small)


def test_an_empty_receiver_is_one_that_is_not_known_yet():
    hello = envelope(next(message for message in SAMPLES if type(message).__name__ == "Hello"))
    unknown = Envelope(hello.sender, Incarnation(""), hello.message)
    assert decode(encode(unknown, LIMITS), LIMITS) == unknown


def test_raw_fields_cannot_be_smuggled_in_by_the_header():
    for kind in (Job, Reserve, Piece):
        head, header, *raw = frames_of(kind)
        fields = json.loads(header)
        target = fields[NESTED_SPEC[kind]] if kind in NESTED_SPEC else fields
        target |= dict.fromkeys(RAW_FIELDS[RequestSpec if kind in NESTED_SPEC else kind], "AAAA")
        assert decode([head, json.dumps(fields).encode(), *raw], LIMITS) == decode([head, header, *raw], LIMITS)


def test_memoryviews_decode_like_bytes():
    for frames in VALID:
        assert decode([memoryview(frame) for frame in frames], LIMITS) == decode(frames, LIMITS)


def test_kv_bytes_are_not_copied():
    frames = frames_of(Piece)
    message = decode([memoryview(frame) for frame in frames], LIMITS).message
    assert isinstance(message, Piece)
    assert isinstance(message.data, memoryview)
    assert message.data.obj is frames[2]
