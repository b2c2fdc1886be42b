"""The connections of a stopping worker."""

import asyncio

import pytest

import kvferry.ops.launcher.worker
from kvferry.ops.launcher.worker import RouterProtocol, RouterServer
from tests.support.eventually import PATIENCE_S, eventually
from tests.support.fake_service import Script
from tests.support.http_app import Connection, HttpApp, connect, server_of
from tests.support.infer_cases import base, encode

GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = 20


@pytest.fixture(autouse=True)
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvferry.ops.launcher.worker, "REQUEST_WAIT_S", PATIENCE_S)


async def accepted(server: RouterServer) -> RouterProtocol:
    """The server's end of the one connection."""
    await eventually(lambda: len(server.server_state.connections) == 1, "it is accepted")
    (connection,) = server.server_state.connections
    assert isinstance(connection, RouterProtocol)
    return connection


async def leave(server: RouterServer) -> None:
    """As after SIGTERM; returns when every connection has been shut down."""
    server.should_exit = True
    await eventually(lambda: server.server_state.leaving, "it stops")


async def assert_last_answer(client: Connection) -> None:
    """The answer has `Connection: close`, and the connection is closed after it."""
    reply = await client.reply()
    assert reply.status == 200
    assert reply.headers["connection"] == "close"
    assert await client.reader.read() == b""


@pytest.mark.rule(37)
@pytest.mark.parametrize(("requests_before", "before"), [(0, 0), (0, HALF), (1, HALF)])
def test_a_request_in_flight_is_answered(requests_before: int, before: int):
    async def run() -> None:
        async with server_of(HttpApp()) as (server, port), connect(port) as client:
            connection = await accepted(server)
            for _ in range(requests_before):
                await client.send(GET)
                await client.reply()
            await client.send(GET[:before])
            await eventually(lambda: len(connection.conn.trailing_data[0]) == before, "half of it has arrived")
            await leave(server)
            await client.send(GET[before:])
            await assert_last_answer(client)

    asyncio.run(run())


@pytest.mark.parametrize("requests_before", [0, 1])
def test_an_idle_connection_is_closed(requests_before: int, monkeypatch: pytest.MonkeyPatch):
    """Immediately if it has answered a request; else after a wait."""

    async def run() -> None:
        if requests_before == 0:
            monkeypatch.setattr(kvferry.ops.launcher.worker, "REQUEST_WAIT_S", 0.0)
        async with server_of(HttpApp()) as (server, port), connect(port) as client:
            await accepted(server)
            for _ in range(requests_before):
                await client.send(GET)
                await client.reply()
            await leave(server)
            assert await client.reader.read() == b""

    asyncio.run(run())


def test_an_answer_that_has_not_started_closes_the_connection():
    async def run() -> None:
        http = HttpApp()
        http.service.script = Script(hold_after=0)
        async with server_of(http) as (server, port), connect(port) as client:
            await client.post("/v2/models/m/infer", encode(base()))
            fake = await http.service.submitted.get()
            await fake.holding.wait()
            await leave(server)
            fake.release()
            await assert_last_answer(client)

    asyncio.run(run())


def test_a_connection_that_arrives_after_the_stop_signal_is_closed():
    """It was accepted before, in the loop iteration of the stop signal: nothing else would close it."""

    async def run() -> None:
        async with server_of(HttpApp()) as (server, port):
            await eventually(lambda: server.started, "it listens")
            server.server_state.leaving = True
            async with connect(port) as client:
                await client.send(GET)
                await assert_last_answer(client)

    asyncio.run(run())
