"""Endpoint strings (`tcp://host:port`, `ipc://path`, `inproc://name`): taking them apart, and what a bind may reach.

With keys on, an endpoint also says whose it is: `tcp://host:port?key=HEX`, the public key that the process there must
have. So who connects knows, wherever the endpoint came from. Pure; resolves no name and opens no socket.
"""

import ipaddress
from typing import NamedTuple

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.toml import quote

SCHEMES = ("tcp", "ipc", "inproc")
KEY_DIGITS = 64
_KEY_MARK = "?key="
_HEX = frozenset("0123456789abcdef")


class Endpoint(NamedTuple):
    """A parsed endpoint. `port` is None unless tcp, 0 for `*`."""

    scheme: str
    host: str
    """Host for tcp without brackets; the path for ipc, the name for inproc."""
    port: int | None
    key: str = ""
    """The public key of who listens there, in hexadecimal; empty when it says none."""

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


def is_key(text: str) -> bool:
    """Whether this is a key as it is written: 32 bytes in lower-case hexadecimal."""
    return len(text) == KEY_DIGITS and _HEX.issuperset(text)


def with_key(text: str, key: str) -> str:
    """The endpoint with this key in place of the one it has, if any."""
    return text.partition(_KEY_MARK)[0] + _KEY_MARK + key


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """What rank `rank` of a tensor-parallel node binds or is reached at, where rank 0 has `endpoint`.

    A given port is counted up, a path gets the rank's number, and a free port is any free port.
    """
    if rank == 0 or not endpoint:
        return endpoint
    parsed, (plain, mark, key) = parse_endpoint(endpoint), endpoint.partition(_KEY_MARK)
    if parsed.port == 0:
        return endpoint
    counted = f"{plain}.{rank}" if parsed.port is None else f"{plain.rpartition(':')[0]}:{parsed.port + rank}"
    return counted + mark + key


def parse_endpoint(text: str) -> Endpoint:
    """Take an endpoint apart; ConfigError when it is none."""
    place, marked, key = text.partition(_KEY_MARK)
    if marked and not is_key(key):
        raise ConfigError(
            f"'{quote(text)}' is not an endpoint: expected {KEY_DIGITS} hexadecimal digits after {_KEY_MARK}"
        )
    scheme, found, rest = place.partition("://")
    if not found or scheme not in SCHEMES or not rest:
        raise ConfigError(f"'{quote(text)}' is not an endpoint: expected tcp://host:port, ipc://path or inproc://name")
    if scheme != "tcp":
        return Endpoint(scheme, rest, None, key)
    host, colon, port = rest.rpartition(":")
    if port == "*":
        port = "0"
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(
            f"'{quote(text)}' is not an endpoint: expected tcp://host:port, with * or 0 for any free port"
        )
    return Endpoint(scheme, host.removeprefix("[").removesuffix("]"), int(port), key)
