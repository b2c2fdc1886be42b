"""One request as a client sees it: what came back and when, and whether that is true. Knows nothing of faults."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import Any

from tests.chaos.client_requests import ClientRequest, Generation
from tests.chaos.http import BrokenOffError, Connection, Head

HUNG_S = 120.0
"""Nothing here takes as long."""
_OVER_DEADLINE_S = 8.0
"""A router worker may be stopped while a deadline passes; it answers when it continues."""
_CROSSED_S = 0.5
"""A kept-alive connection that ends this soon was closed before the request came; later, the request was lost."""


class End(Enum):
    """How a request ended."""

    COMPLETE = "complete"
    LEFT = "client left"
    TIMEOUT = "deadline"
    REFUSED = "refused (429, 503)"
    IDLE_CLOSED = "kept-alive connection closed before the request was read"
    LOST = "connection lost"
    FAILED = "failed"
    HUNG = "hung"


@dataclass
class Record:
    """One request from its sending to its end, in seconds of this machine's monotonic clock."""

    ask: ClientRequest
    started: float
    ended: float = 0.0
    end: End = End.HUNG
    status: int = 0
    port: int = 0
    ids: list[int] = field(default_factory=list)
    event_times: list[float] = field(default_factory=list)
    note: str = ""
    """Why it was refused."""
    wrong: str = ""
    """What is not as it must be."""


async def send_once(
    connection: Connection, model: str, generations: Sequence[Generation], ask: ClientRequest
) -> Record:
    """Send it and take in what comes; the record has no tokens judged yet."""
    record = Record(ask, time.monotonic(), port=connection.port)
    first = connection.requests == 0
    # Not asyncio.timeout: before Python 3.13 one that expires just as its block ends cancels whatever is awaited next.
    taking = asyncio.ensure_future(_take_in(connection, model, generations[ask.number], record))
    try:
        done, _ = await asyncio.wait((taking,), timeout=ask.leaves_after_s or HUNG_S)
        if done:
            taking.result()
        else:
            record.end = End.LEFT if ask.leaves_after_s else End.HUNG
            connection.close()
    except BrokenOffError as error:
        idle = not error.began and not first and time.monotonic() - record.started < _CROSSED_S
        record.end = End.IDLE_CLOSED if idle else End.LOST
        connection.close()
    except (ValueError, KeyError, AssertionError) as error:
        record.end, record.wrong = End.FAILED, f"not what was agreed on: {error!r}"
        connection.close()
    finally:
        taking.cancel()
    record.ended = time.monotonic()
    return record


def judge(record: Record, generation: Generation, truth: Sequence[int]) -> None:
    """Fill in `wrong` where the end, the tokens or the time are not as they must be."""
    record.wrong = record.wrong or _wrong(record, generation, truth)


def _wrong(record: Record, generation: Generation, truth: Sequence[int]) -> str:
    ids, ask, took = record.ids, record.ask, record.ended - record.started
    if record.end is End.HUNG:
        return f"no end in {took:.0f} s, {len(ids)} tokens"
    if ids != list(truth[: len(ids)]):
        where = next(n for n, (one, other) in enumerate(zip_longest(ids, truth)) if one != other)
        return f"token {where} of {len(truth)} differs"
    if record.end is End.COMPLETE and len(ids) != len(truth):
        return f"{len(ids)} of {len(truth)} tokens"
    if record.end is End.TIMEOUT and not ask.timeout_s:
        return "a deadline that no client asked for"
    if ask.timeout_s and record.end is End.TIMEOUT and took < ask.timeout_s - 0.05:
        return f"its deadline came after {took:.2f} s"
    if ask.timeout_s and took > ask.timeout_s + _OVER_DEADLINE_S:
        return f"ended {took - ask.timeout_s:.1f} s after its deadline"
    return f"failed with {record.status}" if record.end is End.FAILED else ""


async def _take_in(connection: Connection, model: str, generation: Generation, record: Record) -> None:
    ask = record.ask
    head = await connection.ask(f"/v2/models/{model}/infer", ask.body(generation), streamed=ask.streamed)
    record.status = head.status
    if head.status != 200:
        await _refused(connection, head, record)
    elif ask.streamed:
        await _stream(connection, record)
    else:
        output = (await connection.json())["outputs"][0]
        assert output["shape"] == [1, len(output["data"])], output
        record.ids, record.end = output["data"], End.COMPLETE


async def _refused(connection: Connection, head: Head, record: Record) -> None:
    body = await connection.json()
    record.end = {408: End.TIMEOUT, 429: End.REFUSED, 503: End.REFUSED}.get(head.status, End.FAILED)
    if record.end is End.REFUSED:
        assert int(head.headers["retry-after"]) > 0, head
        record.note = f"{head.status} {body['error']}"
    if record.end is End.FAILED:
        record.wrong = f"{head.status} {body}"


async def _stream(connection: Connection, record: Record) -> None:
    last: dict[str, Any] = {}
    async for event in connection.events():
        assert "finish_reason" not in last, f"{event} after the end"
        last = event
        if event.get("token_ids"):
            assert event["index"] == len(record.ids), f"index {event['index']} where {len(record.ids)} is due"
            record.ids += event["token_ids"]
            record.event_times.append(time.monotonic())
    reason: str = last.get("finish_reason", "")
    record.end = {"length": End.COMPLETE, "stop": End.COMPLETE, "timeout": End.TIMEOUT}.get(reason, End.FAILED)
    if record.end is End.FAILED:
        record.wrong = f"the stream ended with {last}"
    elif record.end is End.COMPLETE:
        assert last["usage"]["completion_tokens"] == len(record.ids), last
