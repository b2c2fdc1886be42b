"""Checks whether a process listens at an endpoint, by a plain connection attempt that sends nothing.

ZeroMQ does not distinguish a refused connection from a slow one; a refusal means that the process has died. Opens and
closes plain sockets, none of ZeroMQ's.
"""

import asyncio
import contextlib
import socket
from enum import Enum

from kvferry.common.base.run_with_timeout import run_with_timeout
from kvferry.common.config.endpoints import Endpoint, parse_endpoint


class ProbeResult(Enum):
    """The outcome of the connection attempt."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    """The host answers, and no process listens at the endpoint."""
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    """No route, or an unknown host name: says nothing about the process."""
    UNKNOWN = "unknown"
    """Not attempted: `inproc` cannot be probed, or no thread could be started."""


def probe(endpoint: str, timeout_s: float) -> ProbeResult:
    """Try to connect, waiting at most `timeout_s` for each address; resolving the name is not included.

    ConfigError when `endpoint` is invalid.
    """
    parsed = parse_endpoint(endpoint)
    if parsed.scheme == "inproc":
        return ProbeResult.UNKNOWN
    try:
        if parsed.scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as unix:
                unix.settimeout(timeout_s)
                unix.connect(_ipc_path(parsed))
        else:
            socket.create_connection((parsed.host, parsed.port or 0), timeout_s).close()
    except OSError as error:
        return _result_of(error)
    return ProbeResult.ACCEPTED


async def probe_async(endpoint: str, timeout_s: float) -> ProbeResult:
    """`probe` for an event loop; `timeout_s` bounds the whole attempt."""
    parsed = parse_endpoint(endpoint)
    if parsed.scheme == "inproc":
        return ProbeResult.UNKNOWN
    try:
        await run_with_timeout(timeout_s, _connect_and_close(parsed))
    except OSError as error:  # TimeoutError is one
        return _result_of(error)
    return ProbeResult.ACCEPTED


async def _connect_and_close(endpoint: Endpoint) -> None:
    if endpoint.scheme == "ipc":
        _, writer = await asyncio.open_unix_connection(_ipc_path(endpoint))
    else:
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.close()
    with contextlib.suppress(ConnectionError):  # it was accepted; how it closes does not matter
        await writer.wait_closed()


def _result_of(error: OSError) -> ProbeResult:
    if isinstance(error, TimeoutError):
        return ProbeResult.TIMEOUT
    if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
        return ProbeResult.REFUSED
    return ProbeResult.UNREACHABLE


def _ipc_path(endpoint: Endpoint) -> str:
    return "\0" + endpoint.host[1:] if endpoint.host.startswith("@") else endpoint.host
