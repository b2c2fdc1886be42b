"""An ASGI application for real gunicorn workers: it says who answers, starts only when it may, and notes signals.

In the directory that `GATED_DIR` names: a worker that starts makes `starting-PID` and waits for `gate`; one that is
told to leave makes `told-PID`.
"""

import asyncio
import os
import signal
from pathlib import Path
from types import FrameType

from kvferry.router.http.exchange import (
    AsgiSend,
    Receive,
    Scope,
)
from tests.support.eventually import POLL_S

DIRECTORY = "GATED_DIR"


async def app(scope: Scope, receive: Receive, send: AsgiSend) -> None:
    """Answers everything with the worker's pid."""
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

    def told(number: int, frame: FrameType | None) -> None:
        (directory / f"told-{os.getpid()}").touch()
        server(number, frame)

    signal.signal(signal.SIGTERM, told)
    (directory / f"starting-{os.getpid()}").touch()
    while not (directory / "gate").exists():
        await asyncio.sleep(POLL_S)
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
