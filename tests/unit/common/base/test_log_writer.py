"""Lines are written as long as the reader keeps up; the writer never blocks."""

import os
import socket

import pytest

from kvferry.common.base.log_writer import LogWriter

MUCH = "x" * (1 << 17)


@pytest.fixture(params=["blocking", "non-blocking"])
def pipe(request):
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, request.param == "blocking")
    yield read_fd, write_fd
    for fd in (read_fd, write_fd):
        os.close(fd)


def read_all(fd: int) -> bytes:
    os.set_blocking(fd, False)
    data = b""
    try:
        while part := os.read(fd, 1 << 20):
            data += part
    except BlockingIOError:
        pass
    return data


def test_a_line_is_written_whole(pipe):
    read_fd, write_fd = pipe
    lines = LogWriter(write_fd)
    assert lines.write("a")
    assert lines.write("y" * 10_000)
    assert read_all(read_fd) == b"a\n" + b"y" * 10_000 + b"\n"


def test_a_full_pipe_takes_nothing_and_does_not_block(pipe):
    read_fd, write_fd = pipe
    lines = LogWriter(write_fd)
    assert not lines.write(MUCH)
    assert not lines.write("lost")
    assert len(read_all(read_fd)) < len(MUCH)


def test_after_a_torn_line_the_next_starts_on_a_new_line(pipe):
    read_fd, write_fd = pipe
    lines = LogWriter(write_fd)
    lines.write(MUCH)
    assert set(read_all(read_fd)) == {ord("x")}
    assert lines.write("after")
    assert lines.write("more")
    assert read_all(read_fd) == b"\nafter\nmore\n"


def test_a_closed_reader_is_not_an_error():
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    assert not LogWriter(write_fd).write("a")
    os.close(write_fd)
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        assert not LogWriter(ours.fileno()).write("a")


def test_unencodable_text_is_escaped(pipe):
    read_fd, write_fd = pipe
    assert LogWriter(write_fd).write("\udc80")
    assert read_all(read_fd) == b"\\udc80\n"
