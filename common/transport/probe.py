"""Does anyone listen there? A plain connection that says nothing: ZeroMQ does not tell a refusal from a slow answer.

Refused means that the process is gone, at once. Opens and closes its own sockets, none of ZeroMQ's.
"""

import asyncio
import contextlib
import socket
from enum import Enum

from kvferry.common.base.run_with_timeout import run_with_timeout
from kvferry.common.config.endpoints import Endpoint, parse_endpoint


class ProbeResult(Enum):
    """What the connection attempt met."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    """The host answers and nobody listens."""
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    """No route, no such name: says nothing about the process."""
    UNKNOWN = "unknown"
    """Not tried: `inproc` cannot be probed, nor anything without a thread for it."""


def probe(endpoint: str, timeout_s: float) -> ProbeResult:
    """Try to connect, waiting at most `timeout_s` for each address (a name is resolved outside of that time).

    ConfigError when it is no endpoint.
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
        return _judge(error)
    return ProbeResult.ACCEPTED


async def probe_async(endpoint: str, timeout_s: float) -> ProbeResult:
    """`probe` for an event loop; `timeout_s` bounds it all."""
    parsed = parse_endpoint(endpoint)
    if parsed.scheme == "inproc":
        return ProbeResult.UNKNOWN
    try:
        await run_with_timeout(timeout_s, _connect_and_close(parsed))
    except OSError as error:  # TimeoutError is one
        return _judge(error)
    return ProbeResult.ACCEPTED


async def _connect_and_close(endpoint: Endpoint) -> None:
    if endpoint.scheme == "ipc":
        _, writer = await asyncio.open_unix_connection(_ipc_path(endpoint))
    else:
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.close()
    with contextlib.suppress(ConnectionError):  # it was accepted, that is all that was asked
        await writer.wait_closed()


def _judge(error: OSError) -> ProbeResult:
    if isinstance(error, TimeoutError):
        return ProbeResult.TIMEOUT
    if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
        return ProbeResult.REFUSED
    return ProbeResult.UNREACHABLE


def _ipc_path(endpoint: Endpoint) -> str:
    return "\0" + endpoint.host[1:] if endpoint.host.startswith("@") else endpoint.host
