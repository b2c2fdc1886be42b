"""Frames that the present version has put on the wire. They never change; a new version brings a fixture of its own.

To add a golden for a new message type: encode its sample (`samples.py`) once and add the hex to the fixture by hand.
"""

import json
from pathlib import Path

import pytest

from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import MESSAGE_TYPES, PROTOCOL_VERSION
from kvferry.common.protocol.wire import decode, encode
from tests.wire.samples import SAMPLES, envelope

GOLDEN: dict[str, list[str]] = json.loads(Path(__file__).with_name(f"golden_v{PROTOCOL_VERSION}.json").read_text())
BY_NAME = {type(message).__name__: message for message in SAMPLES}


def golden_frames(name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in GOLDEN[name]]


def says_all(today: object, golden: object) -> bool:
    """Whether all that the golden says is in what is sent today, at every depth."""
    if isinstance(golden, dict):
        return isinstance(today, dict) and all(
            name in today and says_all(today[name], value) for name, value in golden.items()
        )
    return today == golden


def test_every_message_type_has_a_golden_and_a_sample():
    names = {kind.__name__ for kind in MESSAGE_TYPES.values()}
    assert set(GOLDEN) == names
    assert set(BY_NAME) == names


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_golden_decodes_to_the_sample(name: str):
    assert decode(golden_frames(name), Limits()) == envelope(BY_NAME[name])


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_what_is_sent_today_says_all_that_the_golden_says(name: str):
    """A field with a default may be added within a version: more keys are right, other values are not."""
    head, header, *raw = [bytes(frame) for frame in encode(envelope(BY_NAME[name]), Limits())]
    golden_head, golden_header, *golden_raw = golden_frames(name)
    assert head == golden_head
    assert raw == golden_raw
    assert says_all(json.loads(header), json.loads(golden_header))


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_unknown_header_keys_are_ignored(name: str):
    head, header, *raw = golden_frames(name)
    extended = json.dumps({**json.loads(header), "of_a_later_minor": [1, {"x": None}]}).encode()
    assert decode([head, extended, *raw], Limits()) == envelope(BY_NAME[name])
