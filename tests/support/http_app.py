"""The HTTP layer with a fake service behind it: for falcon's test client, and served by a real uvicorn on loopback."""

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import uvicorn
from prometheus_client import CollectorRegistry

from kvferry.common.base.clock import ManualClock
from kvferry.common.base.ids import RequestId
from kvferry.common.config.schema import RouterConfig
from kvferry.ops.launcher.worker import RouterProtocol, RouterServer
from kvferry.router.http.app import AppDependencies, create_app
from kvferry.router.http.metrics import RouterMetrics
from kvferry.router.http.shell import AsgiShell
from tests.support.fake_service import FakeTokenService


class RecordList(logging.Handler):
    """Keeps records, and lets a test wait for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.arrived: asyncio.Queue[logging.LogRecord] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.arrived.put_nowait(record)


def _logger(name: str) -> tuple[logging.Logger, RecordList]:
    logger = logging.Logger(name, logging.DEBUG)
    handler = RecordList()
    logger.addHandler(handler)
    return logger, handler


@dataclass
class HttpApp:
    """An application and everything that a test may look at."""

    service: FakeTokenService = field(default_factory=FakeTokenService)
    settings: RouterConfig = field(default_factory=RouterConfig)
    clock: ManualClock = field(default_factory=ManualClock)
    events: list[str] = field(default_factory=list)
    """What the lifespan did."""
    startup_error: Exception | None = None
    started_at: int = 1

    def __post_init__(self) -> None:
        access, self.access = _logger("access")
        logger, self.log = _logger("router")
        self._num_ids = 0
        self.metrics = RouterMetrics(CollectorRegistry())
        self.app: AsgiShell = create_app(
            AppDependencies(
                service=self.service,
                settings=self.settings,
                metrics=self.metrics,
                access_log=access,
                logger=logger,
                clock=self.clock,
                new_request_id=self._new_request_id,
                new_seed=lambda: 7,
                version="1.2.3",
                started_at=self.started_at,
                on_startup=self._start,
                on_shutdown=self._stop,
            )
        )

    def _new_request_id(self) -> RequestId:
        self._num_ids += 1
        return RequestId(f"{self._num_ids:032x}")

    async def _start(self) -> None:
        self.events.append("startup")
        if self.startup_error is not None:
            raise self.startup_error

    async def _stop(self) -> None:
        self.events.append("shutdown")


@dataclass
class Reply:
    """An HTTP answer as it came over a socket."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


class Connection:
    """One client connection, raw bytes in, parsed answers out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: bytes, *headers: str) -> None:
        head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
        await self.send("\r\n".join(head).encode() + b"\r\n\r\n" + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers (lower case) of the next answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in fields.items()}

    async def reply(self) -> Reply:
        """The next whole answer."""
        status, headers = await self.head()
        if "content-length" in headers:
            return Reply(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return Reply(status, headers, body)

    async def chunk(self) -> bytes:
        """The next piece of a chunked answer; empty at its end."""
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readline()
        return data

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def serve(http: HttpApp) -> AsyncIterator[int]:
    """Serve the application in this loop; yields the port."""
    async with server_of(http) as (_, port):
        yield port


@contextlib.asynccontextmanager
async def server_of(http: HttpApp) -> AsyncIterator[tuple[RouterServer, int]]:
    """Serve the application with a worker's server; yields the server and the port, and stops it afterwards."""
    # The protocol is named since asyncio turns Nagle's algorithm off for such sockets only.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = uvicorn.Config(http.app, http=RouterProtocol, log_config=None, lifespan="on", timeout_graceful_shutdown=5)
    server = RouterServer(config)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


@contextlib.asynccontextmanager
async def connect(port: int) -> AsyncIterator[Connection]:
    """A connection to the server."""
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield connection
    finally:
        await connection.close()
