"""Where a server is that a command asks, and whose fault it is when that one refuses. Reads texts; asks nobody."""

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from common.errors import ConfigError, KvferryError, RequestInvalidError

_INVALID_STATUSES = frozenset((400, 404, 405, 413, 422))


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Of every path; without a slash at its end."""

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def parse_url(url: str) -> Target:
    """What --url says. Raises ConfigError for what is no http or https URL."""
    expected = f"--url: expected http://host:port, got {url!r}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as name resolution does; it knows labels that are too long or empty
    except ValueError as error:
        raise ConfigError(f"{expected}: {error}") from None
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not host or port == 0 or parts.query or parts.fragment or not is_plain:
        raise ConfigError(expected)
    tls = parts.scheme == "https"
    return Target(host, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


def why_unreachable(error: OSError) -> str:
    """In the system's own words: event loops put addresses and numbers of their own into theirs."""
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


def refusal(status: int, text: str) -> KvferryError:
    """The error for an answer with this status: RequestInvalidError where what was asked for is at fault."""
    return RequestInvalidError(text) if status in _INVALID_STATUSES else KvferryError(text)
