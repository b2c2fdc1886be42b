"""The format of log lines, and what they must not contain."""

import json
import logging
import os
import re
from pathlib import Path

import pytest

from kvferry.common.base.log import ACCESS_LOGGER, request_logger, setup_logging
from kvferry.common.config.schema import LogConfig


@pytest.fixture
def root_logging():
    """Restores the logging module afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for handler in handlers:
        root.removeHandler(handler)
    yield root
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger(ACCESS_LOGGER).disabled = False


class Written:
    """Reads back what was written to a descriptor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT)

    def getvalue(self) -> str:
        return self._path.read_text()


@pytest.fixture
def start(root_logging, tmp_path):
    """Configures logging and returns a reader of its output."""
    all_written: list[Written] = []

    def setup(config: LogConfig, process: str = "prefill-0") -> Written:
        written = Written(tmp_path / str(len(all_written)))
        all_written.append(written)
        setup_logging(config, process, written.fd)
        return written

    yield setup
    for written in all_written:
        os.close(written.fd)


def test_the_human_readable_format(start):
    stream = start(LogConfig())
    log = request_logger(logging.getLogger("kvferry.common.node"), "0123456789abcdef0123456789abcdef")
    log.info("queued %d tokens", 5, extra={"waited_ms": 7})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    prefill-0 kvferry\.common\.node: "
        r"queued 5 tokens \[request 01234567\] waited_ms=7\n",
        stream.getvalue(),
    )


def test_control_characters_are_escaped(start):
    stream = start(LogConfig())
    logging.getLogger("a").info("peer %s", "x\ny\x1b[2J\x00", extra={"client_id": "a\rb"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"peer x\x0ay\x1b[2J\x00 client_id=a\x0db")


def test_the_json_format(start):
    stream = start(LogConfig(format="json"))
    log = request_logger(logging.getLogger("a"), "ab" * 16)
    log.warning("two\nlines", extra={"nodes": ("p", "d")})
    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert fields.pop("time").endswith("Z")
    assert fields == {
        "level": "warning",
        "process": "prefill-0",
        "logger": "a",
        "message": "two\nlines",
        "request_id": "ab" * 16,
        "nodes": ["p", "d"],
    }


@pytest.mark.parametrize("form", ["human", "json"])
def test_a_traceback_is_included(start, form):
    stream = start(LogConfig(format=form))
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("a").exception("it failed")
    text = stream.getvalue()
    assert "ValueError: why" in text
    assert "Traceback" in text
    if form == "json":
        assert "ValueError: why" in json.loads(text)["exception"]


def test_records_below_the_level_are_dropped(start):
    stream = start(LogConfig(level="warning"))
    logging.getLogger("a").info("not this")
    logging.getLogger("a").error("this")
    assert "not this" not in stream.getvalue()
    assert "this" in stream.getvalue()


def test_the_access_log_can_be_off(start):
    stream = start(LogConfig(access_log=False))
    logging.getLogger(ACCESS_LOGGER).info("GET /")
    assert stream.getvalue() == ""
    stream = start(LogConfig())
    logging.getLogger(ACCESS_LOGGER).info("GET /")
    assert "GET /" in stream.getvalue()


def test_an_access_line_repeats_no_field(start):
    stream = start(LogConfig())
    extra = {"method": "GET", "path": "/a", "status": 200, "client_id": "", "ms": 1.5}
    logging.getLogger(ACCESS_LOGGER).info("GET /a 200", extra=extra)
    assert stream.getvalue().endswith("kvferry.access: GET /a 200 ms=1.5\n")


def test_probes_are_logged_at_debug_level_only(start):
    for config, logged in ((LogConfig(), False), (LogConfig(level="debug"), True), (LogConfig(), False)):
        stream = start(config)
        logging.getLogger(ACCESS_LOGGER).info("GET /v2/health/ready 200", extra={"path": "/v2/health/ready"})
        assert bool(stream.getvalue()) is logged


def test_setup_twice_writes_each_line_once(start):
    start(LogConfig())
    stream = start(LogConfig())
    logging.getLogger("a").info("once")
    assert stream.getvalue().count("once") == 1


def test_http_libraries_are_silenced_at_info(start):
    stream = start(LogConfig(level="info"))
    logging.getLogger("httpx").info("HTTP Request")
    assert stream.getvalue() == ""


@pytest.mark.usefixtures("root_logging")
@pytest.mark.parametrize("form", ["human", "json"])
def test_lines_that_are_not_read_are_dropped_and_counted(form):
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb", buffering=0) as reader, open(write_fd, "wb", buffering=0) as writer:
        setup_logging(LogConfig(format=form), "prefill-0", writer.fileno())
        log = logging.getLogger("a")
        for number in range(3000):
            log.info("line %d", number)
        unread = reader.read(1 << 20)
        kept = unread.count(b"\n")
        assert b"line 0" in unread.splitlines()[0]
        assert kept < 3000
        log.info("the next")
        note, line = reader.read(1 << 20).decode().strip().splitlines()
    assert f"log lines dropped because the reader of this stream fell behind: {3000 - kept}" in note
    assert "the next" in line
    if form == "json":
        assert json.loads(note)["level"] == "warning"
