"""Polling of the health endpoint."""

import asyncio
import socket

from kvferry.ops.launcher.readiness import status_of, wait_until_answered
from tests.support.children import run


class HttpStub:
    """Answers every request with the next of `statuses`; repeats the last one."""

    def __init__(self, *statuses: int):
        self.statuses = list(statuses)
        self.paths: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.paths.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()


def test_ready_requires_good_answers_in_two_rounds():
    async def story():
        stub = HttpStub(503, *[200] * 9, *[200] * 3, 503, 200)
        async with await asyncio.start_server(stub.handle, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await wait_until_answered(url, "/v2/health/ready", workers=2)
        assert stub.statuses == [200]
        assert len(stub.paths) == 1 + 9 + 9 + 2 * 9
        assert set(stub.paths) == {"/v2/health/ready"}

    run(story)


def test_no_server_is_status_0():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert asyncio.run(status_of(f"http://127.0.0.1:{port}", "/")) == 0
