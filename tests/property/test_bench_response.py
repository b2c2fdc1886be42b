"""The reader of the benchmark's client gives the same answer however its bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.ops.bench.serve.response import EventSplitter, MalformedAnswerError, ResponseReader

EVENTS = [b"{}", b'{"index":0}', b"[DONE]"]
BODY = b": a comment\n\n" + b"".join(b"data: " + event + b"\r\n\r\n" for event in EVENTS)


def chunked(body: bytes, sizes: list[int]) -> bytes:
    out, at = b"", 0
    while at < len(body):
        part = body[at : at + (sizes.pop() if sizes else len(body))]
        out += b"%x;extension\r\n%b\r\n" % (len(part), part)
        at += len(part)
    return out + b"0\r\n\r\n"


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, bool]:
    """Bytes of one answer, and whether only the end of the connection ends it."""
    framing = draw(st.sampled_from(["length", "chunked", "until the end"]))
    if framing == "length":
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY, False
    if framing == "chunked":
        sizes = draw(st.lists(st.integers(1, 20)))
        return b"HTTP/1.1 200 OK\r\nTRANSFER-ENCODING: Chunked\r\n\r\n" + chunked(BODY, sizes), False
    return b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n" + BODY, True


@given(answers(), st.lists(st.integers(0, 200)))
def test_any_cut_gives_the_same_events(answer: tuple[bytes, bool], cuts: list[int]) -> None:
    data, until_end = answer
    reader, splitter, events = ResponseReader(), EventSplitter(), []
    for start, end in pairwise(sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})):
        assert not reader.complete
        events += splitter.feed(reader.feed(data[start:end]))
    assert reader.complete is not until_end
    assert reader.end()
    assert reader.status == 200
    assert events == EVENTS
    assert reader.keeps_connection is not until_end


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        ResponseReader().feed(data)


def test_an_answer_that_is_cut_off() -> None:
    for data in (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", b"HTTP/1.1 200", b""):
        reader = ResponseReader()
        reader.feed(data)
        assert not reader.end()


def test_an_answer_without_a_body() -> None:
    for head in (b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"):
        reader = ResponseReader()
        assert reader.feed(head) == b""
        assert reader.complete
        with pytest.raises(MalformedAnswerError):
            reader.feed(b"more")
