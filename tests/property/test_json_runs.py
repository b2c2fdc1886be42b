"""The cutter against the plain decoder: whatever the text and however it arrives, both accept and refuse the same."""

import asyncio
import json
import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.base.ids import RequestId
from kvferry.router.http.exchange import Exchange
from kvferry.router.http.json_body import long_arrays
from kvferry.router.http.json_body.long_arrays import ArrayCutter, ParsedTokenIds
from kvferry.router.http.json_body.reader import JsonBody, read_json_body

VOCAB_SIZE = 1000
SCALARS = ["1", "999", "1000", "-1", "0", "1.5", "1e3", "true", "null", " 7 ", "\n8", "12345678901234567890123"]
BROKEN = ["", "01", "+1", "tru", "1 2", "\\", '"', "[", "]", "{", "}", ":", "\xff", "NaN", ","]
STRINGS = ['"a"', '"[1,2"', '"\\""', '"\\\\"', '"\\\\\\"],["', '"é"', '""']


def expand(value: object, body: JsonBody) -> object:
    """A document with every run put back in its place."""
    if isinstance(value, dict):
        return {key: expand(each, body) for key, each in value.items()}
    if isinstance(value, list):
        if any(isinstance(each, str) and each in body.segments for each in value):
            return body.token_ids(value)
        return [expand(each, body) for each in value]
    return value


def same(cut: object, plain: object) -> bool:
    """Whether an expanded document stands for the plainly decoded one."""
    if isinstance(cut, dict):
        return isinstance(plain, dict) and list(cut) == list(plain) and all(same(cut[k], plain[k]) for k in cut)
    if isinstance(cut, list):
        return isinstance(plain, list) and len(cut) == len(plain) and all(map(same, cut, plain))
    if isinstance(cut, ParsedTokenIds):
        assert isinstance(plain, list)
        cut.check_invariants()
        integers = all(type(each) is int for each in plain)
        inside = integers and all(0 <= each < VOCAB_SIZE for each in plain)
        if cut.not_integer is not None:
            first = next(i for i, each in enumerate(plain) if type(each) is not int)
            return cut.not_integer.index == first
        if cut.outside is not None:
            first = next(i for i, each in enumerate(plain) if not 0 <= each < VOCAB_SIZE)
            return integers and cut.outside.index == first and cut.count == len(plain)
        return inside and cut.ids.tolist() == plain
    return type(cut) is type(plain) and cut == plain


def check(text: bytes, sizes: list[int]) -> bool:
    """Feed `text` in pieces of these sizes; both decoders must agree. Returns whether the text is valid."""
    try:
        plain = msgspec.json.decode(text)
        valid = True
    except (msgspec.DecodeError, RecursionError):
        valid = False
    cutter = ArrayCutter(VOCAB_SIZE)
    try:
        position, turn = 0, 0
        while position < len(text):
            window = text[position : position + sizes[turn % len(sizes)]]
            taken = 0
            while taken < len(window):
                taken = cutter.feed(window, taken)
                cutter.check_invariants()
            position += len(window)
            turn += 1
        cutter.finish()
        rest = msgspec.json.decode(cutter.rest)
    except (msgspec.DecodeError, RecursionError):
        assert not valid, "the cutter refused a valid text"
        return valid
    assert valid, "the cutter accepted a text that is no JSON"
    body = JsonBody(rest, VOCAB_SIZE, cutter.segments)
    assert same(expand(rest, body), plain)
    return valid


def random_text(rng: random.Random, broken: bool) -> str:
    """A JSON text with long and short arrays of all sorts in all places; now and then with something broken in it."""

    def array(depth: int) -> str:
        sort = rng.random()
        if sort < 0.5:
            pool = rng.choice([["5"], ["5", "6", "77"], SCALARS])
            items = [rng.choice(pool) for _ in range(rng.choice([0, 1, 5, 40, 300]))]
            if broken and items and rng.random() < 0.2:
                items[rng.randrange(len(items))] = rng.choice(BROKEN)
            if items and rng.random() < 0.2:
                items.insert(rng.randrange(len(items)), value(depth + 1))
            return "[" + rng.choice([",", ", ", " ,\n"]).join(items) + rng.choice(["]"] * 9 + ["" if broken else "]"])
        return "[" + ",".join(value(depth + 1) for _ in range(rng.randrange(4))) + "]"

    def value(depth: int) -> str:
        if depth > 3 or rng.random() < 0.3:
            return rng.choice(SCALARS + STRINGS)
        if rng.random() < 0.5:
            return array(depth)
        pairs = (f"{rng.choice(STRINGS[:1] + STRINGS)}:{value(depth + 1)}" for _ in range(rng.randrange(5)))
        return "{" + " ,".join(pairs) + "}"

    return rng.choice(["", " "]) + value(0) + rng.choice(["", "\n"])


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a size that a random text has many of."""
    monkeypatch.setattr(long_arrays, "MIN_SEGMENT_BYTES", 24)
    monkeypatch.setattr(long_arrays, "MIN_SEGMENT_ELEMENTS", 4)


@settings(max_examples=1500, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**64), sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4), broken=st.booleans())
def test_cut_and_plain_decoding_agree(small_runs, seed, sizes, broken):
    text = random_text(random.Random(seed), broken).encode("latin1", "replace")
    check(text, sizes)


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    text=st.text(alphabet='[]{},:"\\ 0123456789-.e', min_size=20, max_size=200),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3),
)
def test_any_text_is_refused_or_accepted_alike(small_runs, text, sizes):
    check(text.encode(), sizes)


def test_the_random_texts_are_worth_it(small_runs):
    """Enough of them are valid, enough are not, and enough are cut."""
    valid = cut = 0
    for seed in range(300):
        text = random_text(random.Random(seed), broken=seed % 2 == 0).encode("latin1", "replace")
        valid += check(text, [200])
        cutter = ArrayCutter(VOCAB_SIZE)
        try:
            for start in range(0, len(text), 200):
                cutter.feed(text[start : start + 200])
        except msgspec.DecodeError:
            pass
        cut += bool(cutter.segments)
    assert 100 < valid < 290
    assert cut > 30


@settings(max_examples=60)
@given(
    num_ids=st.integers(9_000, 40_000),
    chunk_bytes=st.integers(1_000, 200_000),
    fault=st.sampled_from([None, "32000", "-1", '"7"', "7.0", "[7]", "x", ""]),
    place=st.floats(0, 1),
)
def test_documents_in_chunks_of_any_size(num_ids, chunk_bytes, fault, place):
    items = [str(i % 32000) for i in range(num_ids)]
    index = min(int(place * num_ids), num_ids - 1)
    if fault is not None:
        items[index] = fault
    text = ('{"a":"[1,2]","data":[' + ", ".join(items) + '],"b":{"c":[1,2,3]}}').encode()

    async def read() -> JsonBody:
        pieces = [text[i : i + chunk_bytes] for i in range(0, len(text), chunk_bytes)]

        async def receive():
            body = pieces.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(pieces)}

        return await read_json_body(Exchange({}, receive, RequestId("0" * 32), 0.0), 10**9, 32000)

    if fault in ("x", ""):
        with pytest.raises(RequestInvalidError, match="body: not valid JSON"):
            asyncio.run(read())
        return
    decoded = asyncio.run(read())
    root = decoded.root
    assert isinstance(root, dict)
    assert (root["a"], root["b"]) == ("[1,2]", {"c": [1, 2, 3]})
    ids = decoded.token_ids(root["data"])
    ids.check_invariants()
    if fault is None:
        assert ids.ids.tolist() == json.loads(text)["data"]
    else:
        found = ids.outside if fault in ("32000", "-1") else ids.not_integer
        assert found is not None
        assert found.index == index
