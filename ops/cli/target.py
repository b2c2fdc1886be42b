"""The server that a command talks to: parses its URL, and turns its refusals into errors. Opens no connection."""

import os
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.common.base.errors import ConfigError, KvferryError, RequestInvalidError

_ANSWERS_IN_CLEAR = frozenset(
    ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
)
"""Reasons that versions of OpenSSL give if a plain HTTP answer arrives instead of a TLS record."""
_INVALID_STATUSES = frozenset((400, 404, 405, 413, 422))


@dataclass(frozen=True, slots=True)
class Target:
    """Address of a server."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Prefix of every path, without a trailing slash."""

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def parse_url(url: str) -> Target:
    """Parse --url. Raises ConfigError if it is not an http or https URL."""
    expected = f"--url: expected http://host:port, got {url!r}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as name resolution does: rejects labels that are too long or empty
    except ValueError as error:
        raise ConfigError(f"{expected}: {error}") from None
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not host or port == 0 or parts.query or parts.fragment or not is_plain:
        raise ConfigError(expected)
    tls = parts.scheme == "https"
    return Target(host, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


def why_unreachable(error: OSError) -> str:
    """The reason in the system's words: asyncio's messages add addresses and numbers, those of TLS source lines."""
    if _speaks_no_tls(error):
        return "the server speaks http, not https"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or 'no reason given').replace('_', ' ').lower()}"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


def unreachable(url: str, error: OSError) -> KvferryError:
    """The error for a failed connection: ConfigError if the URL is wrong."""
    kind = ConfigError if _speaks_no_tls(error) else KvferryError
    return kind(f"{url}: {why_unreachable(error)}")


def _speaks_no_tls(error: OSError) -> bool:
    return isinstance(error, ssl.SSLError) and error.reason in _ANSWERS_IN_CLEAR


def refusal(status: int, text: str) -> KvferryError:
    """The error for an answer with this status: RequestInvalidError if the request is wrong."""
    return RequestInvalidError(text) if status in _INVALID_STATUSES else KvferryError(text)
