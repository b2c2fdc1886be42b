"""Numbers out of their range: refused where a message is decoded, so that no other place has to ask."""

import json
from collections.abc import Iterator
from functools import reduce
from operator import getitem

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.base.errors import ProtocolError
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.wire import decode, encode
from tests.wire.samples import SAMPLES, envelope

LIMITS = Limits()
Path = tuple[str | int, ...]


def integers(value: object, path: Path = ()) -> Iterator[Path]:
    """Where in a header there are integers."""
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from integers(part, (*path, key))


FRAMES = {type(message).__name__: [bytes(f) for f in encode(envelope(message), LIMITS)] for message in SAMPLES}
PLACES = [(name, path) for name, frames in FRAMES.items() for path in integers(json.loads(frames[1]))]


def with_value(name: str, path: Path, value: float) -> list[bytes]:
    """The sample's frames with another number at this place."""
    header = json.loads(FRAMES[name][1])
    reduce(getitem, path[:-1], header)[path[-1]] = value
    return [FRAMES[name][0], json.dumps(header).encode(), *FRAMES[name][2:]]


def test_there_are_integers_to_look_at():
    assert len(PLACES) > 100
    assert ("Commit", ("num_pieces",)) in PLACES
    assert any(path[0] == "key" for _, path in PLACES)


@pytest.mark.parametrize(("name", "path"), PLACES, ids=lambda part: part if isinstance(part, str) else str(part))
def test_a_negative_number_is_refused_at_every_place(name: str, path: Path):
    with pytest.raises(ProtocolError, match=name):
        decode(with_value(name, path, -1), LIMITS)


@given(st.sampled_from(PLACES), st.integers(2**64, 2**80) | st.integers(-(2**80), -1) | st.floats(1.5, 1e300))
def test_what_is_no_number_of_that_range_is_refused(place: tuple[str, Path], value: float):
    with pytest.raises(ProtocolError):
        decode(with_value(*place, value), LIMITS)


@given(st.sampled_from([place for place in PLACES if place[1][-1] != "seed"]), st.integers(2**54, 2**64 - 1))
def test_a_number_beyond_any_count_is_refused(place: tuple[str, Path], value: int):
    with pytest.raises(ProtocolError):
        decode(with_value(*place, value), LIMITS)


@pytest.mark.parametrize(
    ("name", "path", "most"),
    [
        ("Job", ("spec", "priority"), 5),
        ("Job", ("remaining_ms",), 10**12),
        ("Commit", ("num_pieces",), 2**20),
        ("Commit", ("token_id",), 2**32 - 1),
        ("Piece", ("token_end",), 2**31 - 1),
        ("Piece", ("checksum",), 2**32 - 1),
        ("Job", ("spec", "sampling", "seed"), 2**64 - 1),
        ("Heartbeat", ("as_of",), 2**53),
    ],
)
def test_the_largest_of_each_range_is_taken(name: str, path: Path, most: int):
    decode(with_value(name, path, most), LIMITS)
    with pytest.raises(ProtocolError):
        decode(with_value(name, path, most + 1), LIMITS)


@pytest.mark.parametrize("name", ["Job", "Reserve"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.01), ("repetition_penalty", 0.0)],
)
def test_what_no_draw_can_be_made_with_is_refused(name: str, field: str, value: float):
    with pytest.raises(ProtocolError, match=field):
        decode(with_value(name, ("spec", "sampling", field), value), LIMITS)
