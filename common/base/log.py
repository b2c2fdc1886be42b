"""Log lines: for people or as JSON objects, each with time, level, process and, where there is one, the request id.

Sets up the standard logging module and nothing else; every process calls `setup_logging` once, itself. Prompts and
generated tokens are never logged above debug. Nobody waits for whoever reads the lines: while nobody does, they are
dropped and counted.
"""

import logging
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any

import orjson

from kvferry.common.base.log_writer import (
    STDERR_FD,
    LogWriter,
)
from kvferry.common.config.schema import LogConfig

ACCESS_LOGGER = "kvferry.access"
"""One record per HTTP request; silent when log.access_log is false."""

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "request_id",
    "taskName",
    "color_message",  # uvicorn's own second text
}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
"""What others sent, a request id say, must not make lines of its own, nor write to somebody's terminal."""
_PROBED = ("/v2/health/", "/health", "/metrics")
_IN_ACCESS_MESSAGE = ("method", "path", "status")
_SHORT_ID_CHARS = 8


class RequestLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines carry one request's id."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Add the id to what the caller gave as `extra`."""
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs


def request_logger(logger: logging.Logger, request_id: str) -> RequestLogger:
    """`logger` for one request."""
    return RequestLogger(logger, {"request_id": request_id})


class HumanFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO prefill-0 common.node: text [request 0123abcd] key=value`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, then the traceback if there is one."""
        line = f"{_timestamp(record)} {record.levelname:<7} {self._process} {record.name}: {record.getMessage()}"
        request_id = getattr(record, "request_id", "")
        if request_id:
            line += f" [request {str(request_id)[:_SHORT_ID_CHARS]}]"
        said = _IN_ACCESS_MESSAGE if record.name == ACCESS_LOGGER else ()
        for key, value in _extra(record).items():
            if value != "" and key not in said:
                line += f" {key}={value}"
        return line.translate(_CONTROL) + "".join(f"\n{text}" for text in _traceback(self, record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, request_id, the record's extra keys, exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The object, without line breaks."""
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
    """Writes records to a descriptor as far as somebody reads there; says how many were dropped when it goes on."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._lines = LogWriter(fd)
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, or drop it."""
        try:
            if self._num_dropped and self._lines.write(self.format(self._lost())):
                self._num_dropped = 0
            if not self._lines.write(self.format(record)):
                self._num_dropped += 1
        except Exception:  # noqa: BLE001  as the standard handlers: a record that cannot be formatted ends nothing
            self.handleError(record)

    def _lost(self) -> logging.LogRecord:
        said = f"lines that were dropped since nobody read them: {self._num_dropped}"
        return logging.LogRecord("kvferry.log", logging.WARNING, "", 0, said, None, None)


def make_handler(config: LogConfig, process: str, fd: int = STDERR_FD) -> logging.Handler:
    """A handler that writes to `fd` in the configured form."""
    handler = LineHandler(fd)
    handler.setFormatter(JsonFormatter(process) if config.format == "json" else HumanFormatter(process))
    return handler


def setup_logging(config: LogConfig, process: str, fd: int = STDERR_FD) -> None:
    """Make this process log as configured, under the name `process` (e.g. `prefill-0`). May be called again."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(make_handler(config, process, fd))
    root.setLevel(config.level.upper())
    access = logging.getLogger(ACCESS_LOGGER)
    access.disabled = not config.access_log
    access.removeFilter(_is_no_probe)
    if config.level != "debug":
        access.addFilter(_is_no_probe)
    # These tell of every request and connection at info.
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Whether an access record is of a request, not of something that asks every second whether all is well."""
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
