"""The HTTP socket."""

import errno
import socket

import pytest

from kvferry.common.base.errors import KvferryError
from kvferry.ops.launcher.listen import listen


def test_port_zero_picks_a_free_port_and_a_port_in_use_is_an_error():
    listener = listen("127.0.0.1", 0, 5)
    try:
        assert listener.url == f"http://127.0.0.1:{listener.port}"
        with pytest.raises(KvferryError, match=f"port {listener.port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", listener.port, 5)
    finally:
        listener.close()
    listen("127.0.0.1", listener.port, 5).close()


def test_an_invalid_address_is_an_error():
    with pytest.raises(KvferryError, match="is not an address"):
        listen("no such host", 0, 5)


def test_a_client_that_reads_nothing_is_disconnected():
    """Otherwise its answer would stay in memory for as long as it is connected."""
    listener = listen("127.0.0.1", 0, 1, unread_s=0.2)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", listener.port))
        server, _ = listener.socket.accept()
        with server:
            server.settimeout(60.0)
            with pytest.raises(OSError, match="timed out") as caught:
                server.sendall(bytes(50_000_000))
            assert caught.value.errno == errno.ETIMEDOUT  # from the kernel; the error of settimeout has no errno
    listener.close()


def test_a_wildcard_address_is_reached_through_loopback():
    listener = listen("0.0.0.0", 0, 5)
    try:
        assert listener.url == f"http://127.0.0.1:{listener.port}"
    finally:
        listener.close()
