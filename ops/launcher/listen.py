"""The HTTP socket, bound by the launcher and handed to gunicorn: a taken port is told at once, port 0 picks one, and
while gunicorn restarts, connections wait in the kernel."""

import errno
import socket
from dataclasses import dataclass

from kvferry.common.base.errors import (
    ConfigError,
    KvferryError,
)

UNREAD_S = 120.0
"""A client that takes nothing for so long, although something waits for it, is cut off: its answer would be kept for as
long as it stays. Of an answer that fits into the kernel's buffers it may read when it likes."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and where it is."""

    socket: socket.socket
    host: str
    port: int

    @property
    def url(self) -> str:
        """What a client on this machine asks; a wildcard address is reached through loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Close this process's copy."""
        self.socket.close()


def listen(host: str, port: int, backlog: int, *, unread_s: float = UNREAD_S) -> Listener:
    """Bind and listen. ConfigError when the address is none of this machine's, KvferryError when the port is taken."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"router.host: {host!r} is no address: {error.strerror}") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(unread_s * 1000))  # connections inherit it
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"router.host: {host} is no address of this machine") from None
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
        raise KvferryError(f"port {port} on {host} {why}; choose another with --port, or 0 for any free one") from None
    return Listener(sock, host, sock.getsockname()[1])
