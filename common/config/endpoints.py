"""Endpoint strings (`tcp://host:port`, `ipc://path`, `inproc://name`): taking them apart, and what a bind may reach.

Pure; resolves no name and opens no socket.
"""

import ipaddress
from typing import NamedTuple

from common.errors import ConfigError

SCHEMES = ("tcp", "ipc", "inproc")


class Endpoint(NamedTuple):
    """A parsed endpoint. `port` is None unless tcp, 0 for `*`."""

    scheme: str
    host: str
    """Host for tcp without brackets; the path for ipc, the name for inproc."""
    port: int | None

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for every address of this host: nothing that a peer could connect to."""
        return self.scheme == "tcp" and self.host in ("*", "0.0.0.0", "::")

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it. A name other than localhost counts as remote."""
        if self.scheme != "tcp" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_endpoint(text: str) -> Endpoint:
    """Take an endpoint apart; ConfigError when it is none."""
    scheme, found, rest = text.partition("://")
    if not found or scheme not in SCHEMES or not rest:
        raise ConfigError(f"{text!r} is not an endpoint: expected tcp://host:port, ipc://path or inproc://name")
    if scheme != "tcp":
        return Endpoint(scheme, rest, None)
    host, colon, port = rest.rpartition(":")
    if port == "*":
        port = "0"
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an endpoint: expected tcp://host:port, with * or 0 for any free port")
    return Endpoint(scheme, host.removeprefix("[").removesuffix("]"), int(port))
