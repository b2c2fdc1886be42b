"""Links through a proxy on loopback, where namespaces are not allowed: each node is reached through ports of its own.

A cut node's connections stall, and new ones are accepted and stay silent, as packets that vanish look from outside.
The proxy does not know who connects, so a cut is always between a node and everybody, both ways.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence

from tests.chaos.launch import Place
from tests.chaos.links import node_words
from tests.support.eventually import PATIENCE_S

_CHUNK = 1 << 16


class ProxyLinks:
    """The proxy runs in a thread of its own."""

    kind = "a fault proxy on loopback (a cut is between one node and all others)"

    def __init__(self, parts: Sequence[str]) -> None:
        self._held: list[socket.socket] = []
        self._ports = {name: (self._hold(), self._hold()) for name in parts if name != "router"}
        self._fronts = {name: (self._hold(), self._hold()) for name in self._ports}
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._open: dict[str, asyncio.Event] = {name: asyncio.Event() for name in self._ports}
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(PATIENCE_S)

    def places(self) -> dict[str, Place]:
        return {name: Place((), self._words(name)) for name in self._ports}

    def cut(self, one: str, other: str, *, one_way: bool) -> None:
        self._loop.call_soon_threadsafe(self._open[self._node(one, other)].clear)

    def heal(self, one: str, other: str) -> None:
        self._loop.call_soon_threadsafe(self._open[self._node(one, other)].set)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
        for held in self._held:
            held.close()

    def _hold(self) -> int:
        """A free port that no other process is given by chance, even while no life of its node listens there.

        One may listen on a port that is bound elsewhere where both sides allow it, as ZeroMQ and asyncio do.
        """
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        self._held.append(held)
        port: int = held.getsockname()[1]
        return port

    @staticmethod
    def _node(one: str, other: str) -> str:
        return other if one == "router" else one

    def _words(self, name: str) -> tuple[str, ...]:
        keys = ("bind", "kv_bind", "advertise", "kv_advertise")
        ports = (*self._ports[name], *self._fronts[name])
        return node_words(name, {key: f"tcp://127.0.0.1:{port}" for key, port in zip(keys, ports, strict=True)})

    async def _start(self) -> None:
        for name, fronts in self._fronts.items():
            self._open[name].set()
            for front, port in zip(fronts, self._ports[name], strict=True):
                self._servers.append(await asyncio.start_server(self._handler(name, port), "127.0.0.1", front))

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _handler(self, name: str, port: int):
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(OSError):
                await self._open[name].wait()
                there, back = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.closing(back):
                    pumps = [
                        asyncio.ensure_future(self._pump(name, *pair)) for pair in ((reader, back), (there, writer))
                    ]
                    try:
                        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for pump in pumps:
                            pump.cancel()

        return handle

    async def _pump(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._open[name].wait()
                writer.write(data)
                await writer.drain()
