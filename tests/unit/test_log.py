"""What log lines look like, and what does not get into them."""

import io
import json
import logging
import re

import pytest

from common.config.schema import LogConfig
from common.log import ACCESS_LOGGER, request_logger, setup_logging


@pytest.fixture
def root_logging():
    """The logging module as it was, afterwards."""
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


def start(config: LogConfig, process: str = "prefill-0") -> io.StringIO:
    stream = io.StringIO()
    setup_logging(config, process, stream)
    return stream


@pytest.mark.usefixtures("root_logging")
def test_a_line_for_people():
    stream = start(LogConfig())
    log = request_logger(logging.getLogger("common.node"), "0123456789abcdef0123456789abcdef")
    log.info("queued %d tokens", 5, extra={"waited_ms": 7})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    prefill-0 common\.node: "
        r"queued 5 tokens \[request 01234567\] waited_ms=7\n",
        stream.getvalue(),
    )


@pytest.mark.usefixtures("root_logging")
def test_a_line_for_machines():
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


@pytest.mark.usefixtures("root_logging")
@pytest.mark.parametrize("form", ["human", "json"])
def test_a_traceback_goes_along(form):
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


@pytest.mark.usefixtures("root_logging")
def test_the_level_holds():
    stream = start(LogConfig(level="warning"))
    logging.getLogger("a").info("not this")
    logging.getLogger("a").error("this")
    assert "not this" not in stream.getvalue()
    assert "this" in stream.getvalue()


@pytest.mark.usefixtures("root_logging")
def test_the_access_log_can_be_off():
    stream = start(LogConfig(access_log=False))
    logging.getLogger(ACCESS_LOGGER).info("GET /")
    assert stream.getvalue() == ""
    stream = start(LogConfig())
    logging.getLogger(ACCESS_LOGGER).info("GET /")
    assert "GET /" in stream.getvalue()


@pytest.mark.usefixtures("root_logging")
def test_an_access_line_says_nothing_twice():
    stream = start(LogConfig())
    extra = {"method": "GET", "path": "/a", "status": 200, "client_id": "", "ms": 1.5}
    logging.getLogger(ACCESS_LOGGER).info("GET /a 200", extra=extra)
    assert stream.getvalue().endswith("kvferry.access: GET /a 200 ms=1.5\n")


@pytest.mark.usefixtures("root_logging")
def test_probes_are_told_at_debug_only():
    for config, told in ((LogConfig(), False), (LogConfig(level="debug"), True), (LogConfig(), False)):
        stream = start(config)
        logging.getLogger(ACCESS_LOGGER).info("GET /v2/health/ready 200", extra={"path": "/v2/health/ready"})
        assert bool(stream.getvalue()) is told


@pytest.mark.usefixtures("root_logging")
def test_set_up_twice_writes_once():
    start(LogConfig())
    stream = start(LogConfig())
    logging.getLogger("a").info("once")
    assert stream.getvalue().count("once") == 1


@pytest.mark.usefixtures("root_logging")
def test_chatty_libraries_are_kept_quiet():
    stream = start(LogConfig(level="info"))
    logging.getLogger("httpx").info("HTTP Request")
    assert stream.getvalue() == ""
