"""The chaos client against a server that answers as it is reported, and the fault proxy between the two."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tests.chaos import client as client_module
from tests.chaos.client import End, Record
from tests.chaos.client_requests import ClientRequest, Generation, patient
from tests.chaos.fault_proxy import ProxyLinks
from tests.chaos.load import Client, Target
from tests.support.eventually import PATIENCE_S

pytestmark = pytest.mark.asyncio
GENERATION = Generation((1, 2), (), 2)
TRUTH = [7, 8]


def unary(ids: list[int], status: str = "200 OK", **headers: str) -> bytes:
    body = json.dumps({"outputs": [{"shape": [1, len(ids)], "data": ids}], "error": "full"}).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def streamed(*events: dict[str, Any], whole: bool = True) -> bytes:
    texts = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(text), text) for text in texts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + (b"0\r\n\r\n" if whole else b"")


def token(index: int, **more: Any) -> dict[str, Any]:
    return {"index": index, "token_ids": [TRUTH[index]], **more}


LAST = token(1, finish_reason="length", usage={"completion_tokens": 2})


@asynccontextmanager
async def answering(*answers: bytes | None) -> AsyncIterator[Client]:
    """A client whose requests get these answers one after another; None closes the connection, and it ends after."""
    left = list(answers)
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with suppress(ConnectionError):
            while left and b"POST" in await reader.read(1 << 16):
                answer = left.pop(0)
                if answer is None:
                    break
                writer.write(answer)
            await writer.drain()
        await closed(writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = Client(Target(server.sockets[0].getsockname()[1], "m", (GENERATION,), [TRUTH]))
        yield client
        client.leave()
        await asyncio.gather(*(task for task in serving if task is not None))


async def closed(writer: asyncio.StreamWriter) -> None:
    """Closed for good: a transport that is left to the collector warns in some later test."""
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def end_of(answer: bytes | None, ask: ClientRequest) -> Record:
    async with answering(answer) as client:
        return await client.ask(ask)


@pytest.mark.parametrize(
    ("answer", "ask", "end", "wrong"),
    [
        (unary(TRUTH), patient(0), End.COMPLETE, ""),
        (unary([7, 9]), patient(0), End.COMPLETE, "token 1 of 2 differs"),
        (unary([], "503 Service Unavailable", **{"Retry-After": "1"}), patient(0), End.REFUSED, ""),
        (unary([], "503 Service Unavailable"), patient(0), End.FAILED, "not what was agreed on"),
        (unary([], "500 Internal Server Error"), patient(0), End.FAILED, "500"),
        (unary([], "408 Request Timeout"), patient(0), End.TIMEOUT, "a deadline that no client asked for"),
        (unary(TRUTH)[:-3], patient(0), End.LOST, ""),
        (None, patient(0), End.LOST, ""),
        (streamed(token(0), LAST), patient(0, streamed=True), End.COMPLETE, ""),
        (streamed(token(0), token(0), LAST), patient(0, streamed=True), End.FAILED, "index 0 where 1 is due"),
        (streamed(LAST), patient(0, streamed=True), End.FAILED, "index 1 where 0 is due"),
        (streamed(token(0), LAST, LAST), patient(0, streamed=True), End.FAILED, "after the end"),
        (streamed(token(0)), patient(0, streamed=True), End.FAILED, "the stream ended with"),
        (streamed(token(0), whole=False), patient(0, streamed=True), End.LOST, ""),
    ],
)
async def test_one_answer(answer: bytes | None, ask: ClientRequest, end: End, wrong: str) -> None:
    record = await end_of(answer, ask)
    assert record.end is end
    assert wrong in record.wrong
    assert bool(wrong) == bool(record.wrong)


async def test_connection_is_kept_and_one_that_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_CROSSED_S", PATIENCE_S)  # a busy machine may take its time to report the end
    async with answering(unary(TRUTH), streamed(token(0), LAST), None, unary(TRUTH)) as client:
        records = [await client.ask(patient(0, streamed=number == 1)) for number in range(4)]
    assert [record.end for record in records] == [End.COMPLETE, End.COMPLETE, End.IDLE_CLOSED, End.COMPLETE]
    assert len({record.port for record in records}) == 2


async def test_leaver_leaves_in_the_middle() -> None:
    async with answering(streamed(token(0), whole=False)[:-9], unary(TRUTH)) as client:
        first = asyncio.ensure_future(client.ask(ClientRequest(0, 1, True, leaves_after_s=0.05)))
        assert (await first).end is End.LEFT
        assert (await client.ask(patient(0))).end is End.COMPLETE


async def test_cut_node_is_silent_until_it_heals() -> None:
    links = ProxyLinks(("router", "prefill-0"))
    echoed = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)
        await closed(writer)
        echoed.set()

    words = " ".join(links.places()["prefill-0"].after)
    port, front = (int(words.partition(key)[2].split('"')[1].rpartition(":")[2]) for key in (".bind=", ".advertise="))
    try:
        async with await asyncio.start_server(echo, "127.0.0.1", port):
            reader, writer = await asyncio.open_connection("127.0.0.1", front)
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            links.cut("prefill-0", "*", one_way=False)
            writer.write(b"two")
            answer = asyncio.ensure_future(reader.readexactly(3))
            # Another node's worth of round trips through the same loop: what passes would be here.
            await asyncio.wait([answer], timeout=0.1)
            assert not answer.done()
            links.heal("prefill-0", "*")
            assert await answer == b"two"
            await closed(writer)
            await echoed.wait()
    finally:
        links.close()
