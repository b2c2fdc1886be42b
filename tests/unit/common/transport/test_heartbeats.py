"""Heartbeats on connections that break while they are not read: ZeroMQ used to abort the process.

Each scenario runs in a child process, because the process is what would be lost.
"""

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.common.base.ids import Incarnation, new_incarnation
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.options import SocketOptions
from tests.support.transport import ipc_endpoint, take_one, transport_context, wait_until

FAST = SocketOptions(high_water=4, heartbeat_s=0.02, heartbeat_timeout_s=0.6, reconnect_min_s=5.0, reconnect_max_s=5.0)
UNREAD = 30
DEADLINE_S = 60.0


def unread_node(address: str) -> None:
    """The node has more unread messages than its queue holds, and the client is gone."""
    with transport_context() as context:
        node, link, _ = _connected(context, address)
        for _ in range(UNREAD):
            link.send([b"never read"])
        wait_until(lambda: not link.has_pending, step=link.flush)
        link.close()
        _some_heartbeats(context)
        node.close()


def unread_link(address: str) -> None:
    """The client has unread messages, and the node is gone."""
    with transport_context() as context:
        node, link, self_id = _connected(context, address)
        for _ in range(UNREAD):
            node.send(self_id, [b"never read"])
        wait_until(lambda: not node.has_pending, step=node.flush)
        node.close()
        _some_heartbeats(context)
        link.close()


def _connected(context: TransportContext, address: str) -> tuple[NodeSocket, LinkSocket, Incarnation]:
    patient = replace(FAST, heartbeat_timeout_s=DEADLINE_S)  # the test ends it, not a busy machine
    node, self_id = NodeSocket(context, patient), new_incarnation()
    link = LinkSocket(context, self_id, patient)
    link.open()
    link.connect(node.bind(address))
    link.send([b"hello"])
    take_one(node.receive, step=link.flush)
    return node, link, self_id


def _some_heartbeats(context: TransportContext) -> None:
    """Wait until ZeroMQ gives up a handshake without an answer: thirty heartbeat intervals."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = LinkSocket(context, new_incarnation(), FAST)
        link.open()
        link.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = silent.accept()
        with connection:
            while connection.recv(1 << 16):
                pass
        link.close()


SCENARIOS = {scenario.__name__: scenario for scenario in (unread_node, unread_link)}


@pytest.mark.rule(8)
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_process_survives(scenario: str, scheme: str, tmp_path: Path):
    address = ipc_endpoint(tmp_path) if scheme == "ipc" else "tcp://127.0.0.1:*"
    ended = subprocess.run(
        (sys.executable, "-m", __name__, scenario, address), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (ended.returncode, ended.stderr) == (0, "")


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](sys.argv[2])
