"""Sends a measured request; records when its tokens arrived and how it ended."""

import asyncio
from dataclasses import dataclass, field

import orjson

from kvferry.ops.bench.serve.connection import CutOffError, HttpConnection
from kvferry.ops.bench.serve.dialect import CountedBy, Dialect, EventError, Progress
from kvferry.ops.bench.serve.response import EventSplitter, MalformedAnswerError
from kvferry.ops.cli.pluralize import pluralize
from kvferry.ops.cli.target import Target, why_unreachable

_OK = 200


@dataclass(slots=True)
class RequestOutcome:
    """Result of one request. Times are seconds of the monotonic clock."""

    due: float
    """When it should be sent: the start of its times, also if the client was late."""
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Times at which tokens arrived, and how many."""
    tokens: int = 0
    """Total number, by the server's final count if there is one."""
    counted_by: CountedBy = "ids"
    error: str = ""
    """Empty: complete. Else a kind, the key for counting: connect, http_503, timeout, cut_off, error_event, ..."""
    detail: str = ""
    """The error as text."""


class Requester:
    """Sends requests to one server, over reused connections."""

    def __init__(self, target: Target, dialect: Dialect, timeout_s: float) -> None:
        self._target = target
        self._dialect = dialect
        self._timeout_s = timeout_s
        self._idle: list[HttpConnection] = []

    async def send(self, body: bytes, due: float) -> RequestOutcome:
        """Send one request. Never raises for a failure of the server."""
        clock = asyncio.get_running_loop().time
        outcome = RequestOutcome(due, sent=clock())
        connection: HttpConnection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connection()
                await self._ask(connection, body, outcome)
        except TimeoutError:
            _fail(outcome, "timeout", f"no complete answer within {self._timeout_s:g} s")
        except CutOffError:
            _fail(outcome, "cut_off", "the connection closed before the answer was complete")
        except MalformedAnswerError as error:
            _fail(outcome, "garbage", str(error))
        except EventError as error:
            _fail(outcome, error.kind, str(error))
        except OSError as error:
            _fail(outcome, "connect", why_unreachable(error))
        finally:
            outcome.ended = clock()
            self._release(connection)
        return outcome

    def close(self) -> None:
        """Close every connection."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connection(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
            connection.close()
        return await HttpConnection.open(self._target)

    def _release(self, connection: HttpConnection | None) -> None:
        if connection is None:
            return
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _ask(self, connection: HttpConnection, body: bytes, outcome: RequestOutcome) -> None:
        stream = _Stream(self._dialect, outcome)
        status = await connection.ask("POST", self._dialect.path, body, "text/event-stream", stream.on_body)
        if status != _OK:
            raise EventError(f"http_{status}", f"{status} {error_of_body(stream.raw)}")
        if stream.error is not None:
            raise stream.error
        progress = stream.progress
        outcome.counted_by = progress.counted_by
        outcome.tokens = progress.tokens if progress.total is None else progress.total
        if not progress.finished:
            raise EventError(
                "cut_off", f"the stream ended after {pluralize(progress.tokens, 'token')} without a finish_reason"
            )


class _Stream:
    """Reads the body of one answer into an outcome."""

    def __init__(self, dialect: Dialect, outcome: RequestOutcome) -> None:
        self.progress = Progress()
        self.error: EventError | None = None
        self.raw = b""
        """The first bytes of the body, for an answer that is not a stream."""
        self._dialect = dialect
        self._arrivals = outcome.arrivals
        self._splitter = EventSplitter()

    def on_body(self, now: float, data: bytes) -> None:
        if not self.raw:
            self.raw = data
        for event in self._splitter.feed(data):
            if self.error is not None:
                return
            try:
                new = self._dialect.read(event, self.progress)
            except EventError as error:
                self.error = error
                return
            if new:
                self._arrivals.append((now, new))


def _fail(outcome: RequestOutcome, kind: str, detail: str) -> None:
    outcome.error, outcome.detail = kind, detail


def error_of_body(body: bytes) -> str:
    """The server's error text, from the body of an error answer."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = None
    error = fields.get("error") if isinstance(fields, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return str(error)[:200] if error else body[:200].decode(errors="replace").strip()
