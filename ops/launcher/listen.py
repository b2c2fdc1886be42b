"""The listening HTTP socket. The launcher binds it and passes it to gunicorn: a port in use is reported immediately,
port 0 picks a free one, and connections wait in the kernel while gunicorn restarts."""

import errno
import socket
from dataclasses import dataclass

from kvferry.common.base.errors import ConfigError, KvferryError

UNREAD_S = 120.0
"""TCP_USER_TIMEOUT: a client that acknowledges no data for this long is disconnected, since its answer stays in memory
until then. An answer that fits into the kernel's buffers may be read at any time."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and its address."""

    socket: socket.socket
    host: str
    port: int

    @property
    def url(self) -> str:
        """URL for clients on this machine; loopback for a wildcard address."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Close this process's copy."""
        self.socket.close()


def listen(host: str, port: int, backlog: int, *, unread_s: float = UNREAD_S) -> Listener:
    """Bind and listen. Raises ConfigError if the address is not one of this machine, KvferryError if the port is
    in use. `unread_s`: see UNREAD_S.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"router.host: {host!r} is not an address: {error.strerror}") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(unread_s * 1000))  # connections inherit it
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"router.host: {host} is not an address of this machine") from None
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
        raise KvferryError(f"port {port} on {host} {why}; choose another with --port, or 0 for a free one") from None
    return Listener(sock, host, sock.getsockname()[1])
