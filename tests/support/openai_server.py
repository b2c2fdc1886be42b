"""A small OpenAI-style completions server, falcon under uvicorn, that streams like different servers."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import falcon
import uvicorn
from falcon.asgi import App, Request, Response


@dataclass
class Peer:
    """Behaviour of the server, and the requests that it got."""

    pieces: tuple[int, ...] = (1, 1, 1, 1)
    """Number of tokens of each event; repeats from the start."""
    gives: str = "usage"
    """`ids`: token_ids in every event; `running`: a running count; `usage`: a count at the end; `text`: no count."""
    refuses: tuple[str, ...] = ()
    """Fields that it rejects with 422."""
    pause_s: float = 0.0
    """Wait before each event."""
    breaks_after: int | None = None
    """Number of events after which it drops the connection."""
    fails_from: int | None = None
    """Index of the first request that it answers with 503."""
    is_unavailable: bool = False
    """Answers 503 for the model's configuration."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""


class _Completions:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def on_post(self, req: Request, resp: Response) -> None:
        peer = self._peer
        body = json.loads(await req.stream.read())
        peer.bodies.append(body)
        if body["model"] != "m":
            raise falcon.HTTPNotFound(description="no such model")
        refused = [name for name in peer.refuses if name in body]
        if refused:
            resp.status, resp.media = 422, {"error": {"message": f"unknown field {refused[0]}"}}
        elif peer.fails_from is not None and len(peer.bodies) > peer.fails_from:
            resp.status, resp.media = 503, {"error": {"message": "too busy"}}
        else:
            resp.content_type = "text/event-stream"
            resp.stream = self._stream(body)

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        peer, sent, events = self._peer, 0, 0
        wanted: int = body["max_tokens"]
        while sent < wanted:
            new = min(peer.pieces[events % len(peer.pieces)], wanted - sent)
            sent, events = sent + new, events + 1
            await asyncio.sleep(peer.pause_s)
            choice: dict[str, Any] = {"index": 0, "text": "x" * new, "finish_reason": None}
            event: dict[str, Any] = {"choices": [choice]}
            if peer.gives == "ids":
                choice["token_ids"] = [5] * new
            elif peer.gives == "running":
                event["usage"] = {"completion_tokens": sent}
            yield _event(event)
            if events == peer.breaks_after:
                raise ConnectionAbortedError
        if peer.gives == "usage":
            yield _event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": sent}})
        yield b"data: [DONE]\n\n"


class _Unavailable:
    async def on_get(self, req: Request, resp: Response) -> None:
        resp.status, resp.media = 503, {"error": "no node has registered yet"}


@contextlib.contextmanager
def openai_server(peer: Peer) -> Iterator[Peer]:
    """Run the server in its own thread; sets `peer.url`."""
    app = App()
    app.add_route("/v1/completions", _Completions(peer))
    if peer.is_unavailable:
        app.add_route("/v2/models/m/config", _Unavailable())
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    started = threading.Event()

    async def serve() -> None:
        socket = config.bind_socket()
        peer.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        socket.listen()
        started.set()
        await server.serve(sockets=[socket])
        socket.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield peer
    finally:
        server.should_exit = True
        thread.join()


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"
