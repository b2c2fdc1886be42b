"""An ASGI application for real gunicorn workers: it answers with its process id, starts when a gate opens, and records
signals.

In the directory that `GATED_DIR` names: a starting worker makes `starting-PID` and waits for the file `gate`; a worker
that gets SIGTERM makes `stopping-PID`.
"""

import asyncio
import os
import signal
from pathlib import Path
from types import FrameType

from kvferry.router.http.exchange import AsgiSend, Receive, Scope
from tests.support.eventually import POLL_S

DIRECTORY = "GATED_DIR"


async def app(scope: Scope, receive: Receive, send: AsgiSend) -> None:
    """Answer every request with the worker's process id."""
    if scope["type"] == "lifespan":
        await _live(receive, send)
        return
    body = str(os.getpid()).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Receive, send: AsgiSend) -> None:
    directory = Path(os.environ[DIRECTORY])
    await receive()
    server = signal.getsignal(signal.SIGTERM)
    assert callable(server)

    def record_stop(number: int, frame: FrameType | None) -> None:
        (directory / f"stopping-{os.getpid()}").touch()
        server(number, frame)

    signal.signal(signal.SIGTERM, record_stop)
    (directory / f"starting-{os.getpid()}").touch()
    while not (directory / "gate").exists():
        await asyncio.sleep(POLL_S)
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
