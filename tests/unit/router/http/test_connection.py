"""Connections through a real server: disconnects, bodies that are too large, keep-alive, the access log."""

import asyncio

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import RequestId
from kvferry.common.config.schema import RouterConfig
from kvferry.router.http.errors import BodyTooLargeError, ClientGoneError
from kvferry.router.http.exchange import Exchange
from kvferry.router.http.json_body.reader import read_json_body
from tests.support.fake_service import Script
from tests.support.http_app import HttpApp, connect, serve
from tests.support.infer_cases import base, encode

PATH = "/v2/models/m/infer"
BODY = encode(base())
STREAM = "Accept: text/event-stream"


@pytest.mark.parametrize("hold_after", [0, 3])
@pytest.mark.parametrize("headers", [(), (STREAM,)])
def test_a_disconnect_cancels_immediately(hold_after, headers):
    """Only the disconnect can end the wait: no token comes, and no timer runs."""

    async def run() -> None:
        http = HttpApp()
        http.service.script = Script(hold_after=hold_after)
        async with serve(http) as port:
            async with connect(port) as client:
                await client.post(PATH, BODY, *headers)
                fake = await http.service.submitted.get()
                await fake.holding.wait()
            await fake.cancelled.wait()
            record = await http.access.arrived.get()
            assert record.__dict__["status"] == 499
            assert record.__dict__["outcome"] == "cancelled"
            assert fake.cancelled_for[0] == "the client disconnected"
            http.service.check_invariants()
            assert not http.log.records

    asyncio.run(run())


def test_a_disconnect_in_the_middle_of_the_body_starts_nothing():
    async def run() -> None:
        http = HttpApp()
        async with serve(http) as port:
            async with connect(port) as client:
                await client.send(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{{".encode())
            record = await http.access.arrived.get()
            assert record.__dict__["status"] == 499
            assert http.service.streams == []
            assert not http.log.records

    asyncio.run(run())


def test_an_oversized_body_is_refused_before_a_byte_of_it_is_sent():
    async def run() -> None:
        http = HttpApp()
        async with serve(http) as port, connect(port) as client:
            await client.send(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 40000001\r\n\r\n".encode())
            reply = await client.reply()
            assert (reply.status, reply.json()["error_type"]) == (413, "Request Too Large")
            assert reply.headers["connection"] == "close"

    asyncio.run(run())


def test_an_oversized_body_is_not_asked_for():
    async def run() -> None:
        http = HttpApp()
        async with serve(http) as port, connect(port) as client:
            await client.send(
                f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 40000001\r\nExpect: 100-continue\r\n\r\n".encode()
            )
            assert (await client.reply()).status == 413
            assert await client.reader.read() == b""

    asyncio.run(run())


def test_a_client_that_sends_an_oversized_body_anyway_gets_the_answer():
    async def run() -> None:
        http = HttpApp(settings=RouterConfig(max_body_bytes=100_000))
        async with serve(http) as port, connect(port) as client:
            await client.post(PATH, b" " * 180_000)
            assert (await client.reply()).status == 413
            assert await client.reader.read() == b""

    asyncio.run(run())


def test_an_oversized_body_without_a_length_is_counted():
    async def run() -> None:
        http = HttpApp(settings=RouterConfig(max_body_bytes=100_000))
        async with serve(http) as port, connect(port) as client:
            await client.send(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for _ in range(11):
                await client.send(b"2710\r\n" + b" " * 10_000 + b"\r\n")
            # The end of the body was not sent: the answer must not wait for it.
            assert (await client.reply()).status == 413
            await client.close()
            record = await http.access.arrived.get()
            assert record.__dict__["status"] == 413
            assert http.service.streams == []
            assert not http.log.records

    asyncio.run(run())


@pytest.mark.parametrize("sent", [b"", b"{", BODY[:-1]])
def test_a_body_that_is_not_complete_in_time_is_refused(sent: bytes):
    async def run() -> None:
        http = HttpApp(settings=RouterConfig(body_timeout_s=0.05))
        async with serve(http) as port, connect(port) as client:
            await client.send(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + sent)
            reply = await client.reply()
            assert (reply.status, reply.json()["error_type"]) == (408, "Request Timeout")
            assert reply.json()["error"] == "body: not received completely within 0.05 s"
            assert reply.headers["connection"] == "close"
            assert await client.reader.read() == b""
            assert http.service.streams == []
            assert not http.log.records

    asyncio.run(run())


@pytest.mark.parametrize("path", [PATH, "/v2/health/live"])
def test_a_head_with_two_lengths_is_refused(path: str):
    """A proxy in front of this server may have used the other one, and see another request in the rest."""

    async def run() -> None:
        http = HttpApp()
        async with serve(http) as port, connect(port) as client:
            head = (
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            await client.send(head.encode() + f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n")
            reply = await client.reply()
            assert (reply.status, reply.json()["error_type"]) == (400, "Bad Request")
            assert reply.headers["connection"] == "close"
            assert await client.reader.read() == b""
            assert http.service.streams == []
            assert not http.log.records

    asyncio.run(run())


@pytest.mark.parametrize(("line", "status"), [("9.9", 505), ("2.0", 505), ("1.0", 200)])
def test_an_unsupported_version_of_http_is_refused(line: str, status: int):
    async def run() -> None:
        http = HttpApp()
        async with serve(http) as port, connect(port) as client:
            head = f"POST {PATH} HTTP/{line}\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n"
            await client.send(head.encode() + BODY)
            reply = await client.reply()
            assert reply.status == status
            if status == 505:
                assert reply.json()["error"] == f"head: HTTP/{line} is not supported; use HTTP/1.1"
                assert reply.headers["connection"] == "close"
            assert await client.reader.read() == b""
            assert len(http.service.streams) == (status == 200)
            assert not http.log.records

    asyncio.run(run())


def test_a_body_of_exactly_the_limit_is_read():
    async def run() -> None:
        http = HttpApp(settings=RouterConfig(max_body_bytes=100_000))
        async with serve(http) as port, connect(port) as client:
            await client.post(PATH, BODY + b" " * (100_000 - len(BODY)))
            assert (await client.reply()).status == 200
            await client.send(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            await client.send(f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n")
            assert (await client.reply()).status == 200

    asyncio.run(run())


def test_size_is_reported_before_bad_json():
    """An endless body is refused for its size although its first bytes are no JSON."""

    async def run() -> None:
        num_calls = 0

        async def receive():
            nonlocal num_calls
            num_calls += 1
            return {"type": "http.request", "body": b"[,]" * 30_000, "more_body": True}

        exchange = Exchange({}, receive, RequestId("0" * 32), 0.0)
        with pytest.raises(BodyTooLargeError):
            await read_json_body(exchange, 1_000_000, 32000)
        assert num_calls == 12

    asyncio.run(run())


def test_an_unknown_model_or_path_is_answered_without_the_body():
    async def run() -> None:
        http = HttpApp()
        async with serve(http) as port:
            for path in ("/v2/models/nope/infer", "/nope"):
                async with connect(port) as client:
                    await client.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n".encode())
                    assert (await client.reply()).status == 404

    asyncio.run(run())


def test_a_connection_serves_several_requests():
    async def run() -> None:
        http = HttpApp()
        async with serve(http) as port, connect(port) as client:
            for body, status in ((BODY, 200), (b"{", 422), (BODY, 200)):
                await client.post(PATH, body)
                assert (await client.reply()).status == status
            await client.post("/v2/models/nope/infer", BODY)
            assert (await client.reply()).status == 404
            await client.post(PATH, BODY, STREAM)
            assert (await client.reply()).body.count(b"data: ") == 21
            await client.post(PATH, BODY)
            assert (await client.reply()).status == 200
            # An open connection after an answer must not count as a disconnect.
            statuses = [(await http.access.arrived.get()).__dict__["status"] for _ in range(6)]
            assert statuses == [200, 422, 200, 404, 200, 200]
            http.service.check_invariants()

    asyncio.run(run())


def test_two_requests_may_share_an_id():
    async def run() -> None:
        http = HttpApp()
        http.service.script = Script(hold_after=1)
        async with serve(http) as port, connect(port) as one, connect(port) as two:
            await one.post(PATH, BODY)
            await two.post(PATH, BODY)
            streams = [await http.service.submitted.get() for _ in range(2)]
            for fake in streams:
                await fake.holding.wait()
            assert len({fake.request_id for fake in streams}) == 2
            for fake in streams:
                fake.release()
            for client in (one, two):
                reply = await client.reply()
                assert (reply.status, reply.json()["id"]) == (200, "42")

    asyncio.run(run())


def test_the_access_log_has_one_record_per_request():
    async def run() -> None:
        http = HttpApp()
        http.service.script = Script(hold_after=1)
        async with serve(http) as port, connect(port) as client:
            await client.post(PATH, BODY)
            fake = await http.service.submitted.get()
            await fake.holding.wait()
            http.clock.advance(0.25)
            fake.release()
            reply = await client.reply()
            record = (await http.access.arrived.get()).__dict__
            assert reply.headers["x-request-id"] == record["request_id"] == f"{1:032x}"
            assert (record["client_id"], record["status"]) == ("42", 200)
            assert (record["method"], record["path"]) == ("POST", PATH)
            assert (record["ms"], record["prompt_tokens"], record["completion_tokens"]) == (250.0, 3, 20)
            assert (record["attempts"], record["prefill_node"], record["decode_node"]) == (1, "p0", "d0")
            assert record["outcome"] == "length"
            await client.send(b"GET /a%0Ab HTTP/1.1\r\nHost: x\r\n\r\n")
            await client.reply()
            record = (await http.access.arrived.get()).__dict__
            assert (record["path"], record["status"], record["client_id"]) == ("/a%0Ab", 404, "")
            assert "prompt_tokens" not in record, "no count, which differs from a count of 0"

    asyncio.run(run())


def test_an_exchange_enforces_the_order_of_its_calls():
    async def run() -> None:
        messages = [{"type": "http.request", "body": b"x", "more_body": False}, {"type": "http.disconnect"}]

        async def receive():
            return messages.pop(0)

        gone = asyncio.Event()
        exchange = Exchange({}, receive, RequestId("0" * 32), 0.0)
        assert await exchange.read_chunk() == b"x"
        assert await exchange.read_chunk() is None
        exchange.watch(gone.set)
        with pytest.raises(InvariantError):
            exchange.watch(gone.set)
        with pytest.raises(InvariantError):
            await exchange.read_chunk()
        await gone.wait()
        assert exchange.gone
        exchange.check_invariants()
        await exchange.close()
        await exchange.close()

    asyncio.run(run())


def test_a_disconnect_after_the_answer_does_not_count():
    async def run() -> None:
        async def receive():
            return {"type": "http.disconnect"}

        exchange = Exchange({}, receive, RequestId("0" * 32), 0.0)
        exchange.note_sent({"type": "http.response.start", "status": 200})
        exchange.note_sent({"type": "http.response.body", "body": b""})
        with pytest.raises(ClientGoneError):
            await exchange.read_chunk()
        assert not exchange.gone
        exchange.check_invariants()

    asyncio.run(run())
