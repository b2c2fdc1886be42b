"""A link that is read while its node dies and restarts, again and again. In a child process: libzmq could abort it."""

import subprocess
import sys
import threading
import time

from kvferry.common.base.ids import Incarnation, new_incarnation
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.options import SocketOptions
from tests.support.transport import bind_again, wait_until

INCARNATIONS = 60
MESSAGES = 2000
OPTIONS = SocketOptions(high_water=0, reconnect_min_s=0.001, reconnect_max_s=0.001)
FRAMES = [b"type", b"header", b"ids"]


def _serve(context: TransportContext, places: list[str]) -> None:
    """Incarnations of a node at one address; each sends a burst of messages and exits before all are received."""
    for _ in range(INCARNATIONS):
        node = NodeSocket(context, OPTIONS)
        if places:
            bind_again(node, places[0])
        else:
            places.append(node.bind("tcp://127.0.0.1:*"))
        peer = _first_peer(node)
        for _ in range(MESSAGES):
            node.send(peer, FRAMES)
        time.sleep(0.01)
        node.close()


def _first_peer(node: NodeSocket) -> Incarnation:
    while True:
        for peer, _ in node.receive():
            return peer
        time.sleep(0)


def _read(context: TransportContext, places: list[str], server: threading.Thread) -> int:
    link = LinkSocket(context, new_incarnation(), OPTIONS)
    link.open()
    wait_until(lambda: places)
    link.connect(places[0])
    count = 0
    while server.is_alive():
        link.try_send([b"hello"])
        for frames in link.receive(128):
            assert frames == FRAMES
            count += 1
            time.sleep(0)  # lets the other threads run, as they do while a message is handled
    link.close()
    return count


def main() -> None:
    context = TransportContext()
    places: list[str] = []
    server = threading.Thread(target=_serve, args=(context, places))
    server.start()
    assert _read(context, places, server) > MESSAGES
    server.join()
    context.close()


def test_reconnecting_while_messages_are_read() -> None:
    done = subprocess.run((sys.executable, "-m", __name__), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main()
