"""Measures what CURVE costs a KV transfer: throughput of the KV sockets with and without keys, tcp on loopback.

Run as `python -m kvferry.ops.bench.keys`. Both ends are in this process, each with its own ZeroMQ context and IO
thread, which encrypts or decrypts. The bytes of one piece are sent repeatedly, as the KV mover sends pieces.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kvferry.common.base.ids import new_incarnation
from kvferry.common.config.keys import AllowedKeys, key_line
from kvferry.common.config.protocol import Limits
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.options import SocketOptions
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.security import Security, new_pair

PIECE_BYTES = Limits().piece_target_bytes
HIGH_WATER = 64
ROUNDS = 5
SECONDS = 1.0
_MB = 1e6


def measure_rate(security: Security | None, seconds: float) -> float:
    """Megabytes per second from a link socket to a node socket, in pieces of PIECE_BYTES."""
    options = SocketOptions.kv(Limits(), HIGH_WATER)
    sending, receiving = TransportContext(security), TransportContext(security)
    node = NodeSocket(receiving, options)
    link = LinkSocket(sending, new_incarnation(), options)
    try:
        bound = node.bind("tcp://127.0.0.1:*")
        link.open()
        link.connect(bound)
        return _rate(node, link, seconds)
    finally:
        link.close()
        node.close()
        sending.close()
        receiving.close()


def _rate(node: NodeSocket, link: LinkSocket, seconds: float) -> float:
    piece = bytes(PIECE_BYTES)
    received = 0
    begun: float | None = None
    loop = PollLoop()

    def on_readable() -> None:
        nonlocal received, begun
        for _ in node.receive():
            if begun is None:  # the first piece has arrived: the handshake is not measured
                begun = time.perf_counter()
            else:
                received += 1

    def on_writable() -> None:
        while link.try_send([piece]):
            pass

    loop.add(node, on_readable)
    loop.add(link, on_writable)
    loop.watch_writable(link, True)
    while begun is None or time.perf_counter() - begun < seconds:
        loop.run_once(1.0)
    return received * PIECE_BYTES / _MB / (time.perf_counter() - begun)


def make_security(folder: Path) -> Security:
    """Keys of a node that allows itself."""
    public, secret = new_pair("node")
    allowed = folder / "allowed"
    allowed.write_text(key_line("public", public))
    return Security(secret, AllowedKeys("allowed", allowed))


def main(argv: list[str]) -> int:
    """Measure alternately; print both medians and their ratio."""
    argparse.ArgumentParser(prog="python -m kvferry.ops.bench.keys", description=__doc__).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        security = make_security(Path(folder))
        plain, curve = [], []
        for _ in range(ROUNDS):
            plain.append(measure_rate(None, SECONDS))
            curve.append(measure_rate(security, SECONDS))
    without, with_keys = statistics.median(plain), statistics.median(curve)
    sys.stdout.write(
        f"pieces of {PIECE_BYTES / 2**20:g} MiB over loopback, median of {ROUNDS} alternating rounds\n"
        f"without keys  {without:8.0f} MB/s\n"
        f"with keys     {with_keys:8.0f} MB/s   {with_keys / without:.2f} of the rate without\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
