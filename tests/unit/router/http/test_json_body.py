"""A body that is not JSON is refused with the fault and its position."""

import pytest

from kvferry.common.base.errors import RequestInvalidError
from kvferry.router.http.json_body.reader import LARGE_BYTES, decode_json


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("foo", "no value begins with 'foo' (byte 0)"),
        ('{"ü": tru', "no value begins with 'tru' (byte 7)"),
        ('{"a": [1, nan', "no value begins with 'nan' (byte 10)"),
        ("foo" * 100, "no value begins with 'foofoofoofoofoofoofo' (byte 0)"),
        ('{"top_p": NaN}', "invalid character (byte 10)"),
        ('{"top_p": None}', "no value begins with 'None' (byte 10)"),
        ('["\t"]', "invalid character (byte 2)"),
        ('{"inputs": [1, 2', "it ends too early (after 16 bytes)"),
        ('{"inputs":', "it ends too early (after 10 bytes)"),
        ('{"inputs', "it ends too early (after 8 bytes)"),
        ('{"a": 1,}', "trailing comma in object (byte 8)"),
        ("{'a': 1}", "object keys must be strings (byte 1)"),
        (r'"\ud800"', "it ends too early"),
        ('["' + "x" * LARGE_BYTES, "it ends too early"),
    ],
)
def test_the_fault_and_its_position(text: str, fault: str):
    with pytest.raises(RequestInvalidError) as raised:
        decode_json(text.encode())
    assert str(raised.value) == f"body: not valid JSON: {fault}"


@pytest.mark.parametrize(("text", "fault"), [("foo", "it ends too early"), ("{a", "object keys must be strings")])
def test_no_position_is_reported_if_arrays_were_cut_out(text: str, fault: str):
    with pytest.raises(RequestInvalidError) as raised:
        decode_json(text.encode(), is_whole=False)
    assert str(raised.value) == f"body: not valid JSON: {fault}"


@pytest.mark.parametrize("text", [b"[" * 5000, b'{"a": ' * 5000, b"[1, " + b"1" * 5000, b'["\xff', b'"\xc3'])
def test_unusual_bodies_are_refused_as_invalid(text: bytes):
    with pytest.raises(RequestInvalidError, match=r"^body: "):
        decode_json(text)
