"""URLs of servers, and the error class of a refusal or a failed connection."""

import ssl

import pytest

from kvferry.common.base.errors import ConfigError, RequestInvalidError
from kvferry.ops.cli.target import Target, parse_url, refusal, why_unreachable


@pytest.mark.parametrize(
    ("url", "target", "authority"),
    [
        ("http://127.0.0.1:1025", Target("127.0.0.1", 1025, False, ""), "127.0.0.1:1025"),
        ("http://host/", Target("host", 80, False, ""), "host"),
        ("https://host/a/b/", Target("host", 443, True, "/a/b"), "host"),
        ("http://[::1]:7", Target("::1", 7, False, ""), "[::1]:7"),
    ],
)
def test_valid_urls(url: str, target: Target, authority: str):
    assert parse_url(url) == target
    assert target.authority == authority


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:1025", "localhost", "ftp://x", "http://", "http://:80", "http://x:port", "http://x:70000", "http://x:0",
        "http://[::1", "http://x?a=1", "http://x#a", "http://a b", "http://x/a b", "http://x/\n", "http://ü", "http://a..b",
        f"http://{'a' * 70}",
    ],
)  # fmt: skip
def test_invalid_urls(url: str):
    with pytest.raises(ConfigError, match="--url: expected http://host:port, got "):
        parse_url(url)


@pytest.mark.parametrize(
    ("status", "is_invalid"),
    [(400, True), (404, True), (413, True), (422, True), (408, False), (429, False), (503, False)],
)
def test_error_class_of_a_refusal(status: int, is_invalid: bool):
    assert isinstance(refusal(status, "text"), RequestInvalidError) == is_invalid


def test_tls_errors_name_no_source_lines():
    untrusted = ssl.SSLCertVerificationError(
        1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed (_ssl.c:1006)"
    )
    untrusted.reason, untrusted.verify_message = "CERTIFICATE_VERIFY_FAILED", "self-signed certificate"
    assert why_unreachable(untrusted) == "its certificate is not trusted: self-signed certificate"
    other = ssl.SSLError(1, "[SSL: TLSV1_ALERT_INTERNAL_ERROR] tlsv1 alert internal error (_ssl.c:1006)")
    other.reason = "TLSV1_ALERT_INTERNAL_ERROR"
    assert why_unreachable(other) == "TLS failed: tlsv1 alert internal error"
