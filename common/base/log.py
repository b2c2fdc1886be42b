"""Logging: human-readable lines or JSON objects, each with time, level, process and, if there is one, the request id.

Configures the standard logging module and nothing else; each process calls `setup_logging` once. Prompts and generated
tokens are never logged above debug level. Logging never blocks: lines that the reader does not take are dropped and
counted.
"""

import logging
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any, Protocol

import orjson

from kvferry.common.base.log_writer import STDERR_FD, LogWriter

ACCESS_LOGGER = "kvferry.access"
"""One record per HTTP request; disabled when log.access_log is false."""

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "request_id",
    "taskName",
    "color_message",  # uvicorn's coloured copy of the message
}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
"""Escapes for control characters: text from a client (a request id) must not forge lines or control a terminal."""
_PROBED = ("/v2/health/", "/health", "/metrics")
_IN_ACCESS_MESSAGE = ("method", "path", "status")
_SHORT_ID_CHARS = 8


class LogSettings(Protocol):
    """What logging needs of a configuration: section [log]."""

    @property
    def level(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def access_log(self) -> bool: ...


class RequestLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds one request's id to each record."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs


def request_logger(logger: logging.Logger, request_id: str) -> RequestLogger:
    return RequestLogger(logger, {"request_id": request_id})


class HumanFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO prefill-0 common.node: text [request 0123abcd] key=value`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_timestamp(record)} {record.levelname:<7} {self._process} {record.name}: {record.getMessage()}"
        request_id = getattr(record, "request_id", "")
        if request_id:
            line += f" [request {str(request_id)[:_SHORT_ID_CHARS]}]"
        in_message = _IN_ACCESS_MESSAGE if record.name == ACCESS_LOGGER else ()
        for key, value in _extra(record).items():
            if value != "" and key not in in_message:
                line += f" {key}={value}"
        return line.translate(_CONTROL) + "".join(f"\n{text}" for text in _traceback(self, record))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, process, logger, message, request_id, the extra keys, exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", "")
        if request_id:
            fields["request_id"] = request_id
        fields.update(_extra(record))
        trace = _traceback(self, record)
        if trace:
            fields["exception"] = "\n".join(trace)
        return orjson.dumps(fields, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class LineHandler(logging.Handler):
    """Writes records to a descriptor without blocking. After a gap it reports how many lines were dropped."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._writer = LogWriter(fd)
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._num_dropped and self._writer.write(self.format(self._drop_record())):
                self._num_dropped = 0
            if not self._writer.write(self.format(record)):
                self._num_dropped += 1
        except Exception:  # noqa: BLE001  as in the standard handlers: a record that cannot be formatted must not stop the process
            self.handleError(record)

    def _drop_record(self) -> logging.LogRecord:
        text = f"log lines dropped because the reader of this stream fell behind: {self._num_dropped}"
        return logging.LogRecord("kvferry.log", logging.WARNING, "", 0, text, None, None)


def make_handler(config: LogSettings, process: str, fd: int = STDERR_FD) -> logging.Handler:
    """A handler that writes to `fd` in the configured format."""
    handler = LineHandler(fd)
    handler.setFormatter(JsonFormatter(process) if config.format == "json" else HumanFormatter(process))
    return handler


def setup_logging(config: LogSettings, process: str, fd: int = STDERR_FD) -> None:
    """Configure logging of this process under the name `process` (e.g. `prefill-0`). May be called more than once."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(make_handler(config, process, fd))
    root.setLevel(config.level.upper())
    access = logging.getLogger(ACCESS_LOGGER)
    access.disabled = not config.access_log
    access.removeFilter(_is_not_a_probe)
    if config.level != "debug":
        access.addFilter(_is_not_a_probe)
    # These log every request and connection at info level.
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


def _is_not_a_probe(record: logging.LogRecord) -> bool:
    """Whether an access record is about a request, not a health check or a scrape of metrics."""
    return not str(getattr(record, "path", "")).startswith(_PROBED)


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in record.__dict__.items() if key not in _PLAIN}


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    elif record.exc_text:
        parts.append(record.exc_text)
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return parts
