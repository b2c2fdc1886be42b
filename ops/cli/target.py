"""Where a server is that a command asks, and whose fault it is when that one refuses. Reads texts; asks nobody."""

import os
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.common.base.errors import (
    ConfigError,
    KvferryError,
    RequestInvalidError,
)

_ANSWERS_IN_CLEAR = frozenset(
    ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
)
"""What OpenSSL calls it, in one version or another, where a line of HTTP comes in place of a TLS record."""
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
    """In the system's own words: event loops put addresses and numbers of their own into theirs, TLS its source's."""
    if _speaks_no_tls(error):
        return "this server speaks http, not https"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or 'no reason given').replace('_', ' ').lower()}"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


def unreachable(url: str, error: OSError) -> KvferryError:
    """The error for a server that could not be spoken to: ConfigError where its URL is at fault."""
    kind = ConfigError if _speaks_no_tls(error) else KvferryError
    return kind(f"{url}: {why_unreachable(error)}")


def _speaks_no_tls(error: OSError) -> bool:
    return isinstance(error, ssl.SSLError) and error.reason in _ANSWERS_IN_CLEAR


def refusal(status: int, text: str) -> KvferryError:
    """The error for an answer with this status: RequestInvalidError where what was asked for is at fault."""
    return RequestInvalidError(text) if status in _INVALID_STATUSES else KvferryError(text)
