"""Parses endpoints (`tcp://host:port`, `ipc://path`, `inproc://name`). Pure; resolves no name and opens no socket.

With keys on, an endpoint also names the public key that the process there must have: `tcp://host:port?key=HEX`. So the
connecting process knows the key, wherever it got the endpoint from.
"""

import ipaddress
from typing import NamedTuple

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.toml import quote

_SCHEMES = ("tcp", "ipc", "inproc")
KEY_DIGITS = 64
_KEY_MARK = "?key="
_HEX = frozenset("0123456789abcdef")


class Endpoint(NamedTuple):
    """A parsed endpoint. `port` is None unless tcp, 0 for `*`."""

    scheme: str
    host: str
    """tcp: the host without brackets. ipc: the path. inproc: the name."""
    port: int | None
    key: str = ""
    """The public key of the listening process in hexadecimal, or empty."""

    @property
    def is_wildcard(self) -> bool:
        """Whether it means every address of this host, so that no peer can connect to it."""
        return self.scheme == "tcp" and self.host in ("*", "0.0.0.0", "::")

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it. A host name other than localhost counts as remote."""
        if self.scheme != "tcp" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def is_key(text: str) -> bool:
    """Whether this is a key: 32 bytes in lower-case hexadecimal."""
    return len(text) == KEY_DIGITS and _HEX.issuperset(text)


def with_key(text: str, key: str) -> str:
    """The endpoint with this key, which replaces the one it has."""
    return text.partition(_KEY_MARK)[0] + _KEY_MARK + key


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of rank `rank` of a tensor-parallel node whose rank 0 has `endpoint`.

    The rank is added to a fixed port and appended to a path or name; a free port stays a free port.
    """
    if rank == 0 or not endpoint:
        return endpoint
    parsed, (plain, mark, key) = parse_endpoint(endpoint), endpoint.partition(_KEY_MARK)
    if parsed.port == 0:
        return endpoint
    counted = f"{plain}.{rank}" if parsed.port is None else f"{plain.rpartition(':')[0]}:{parsed.port + rank}"
    return counted + mark + key


def parse_endpoint(text: str) -> Endpoint:
    """Parse an endpoint. ConfigError when it is invalid."""
    place, marked, key = text.partition(_KEY_MARK)
    if marked and not is_key(key):
        raise ConfigError(
            f"'{quote(text)}' is not an endpoint: expected {KEY_DIGITS} lower-case hexadecimal digits after {_KEY_MARK}"
        )
    scheme, found, rest = place.partition("://")
    if not found or scheme not in _SCHEMES or not rest:
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
