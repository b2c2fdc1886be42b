"""Socket options (high-water marks, heartbeats, sizes), and binding and connecting with them. Creates no socket.

Checks which addresses may be bound and connected to, and sets keys. Also `zmq_features`: what the ZeroMQ library of
this machine supports, for `kvferry doctor`.
"""

import ipaddress
from dataclasses import dataclass

import zmq

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.endpoints import Endpoint, parse_endpoint, with_key
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.framing import OVERHEAD_BYTES
from kvferry.common.transport.probe import ProbeResult, probe
from kvferry.common.transport.security_domain import SecurityDomain

_IPC_PROBE_S = 0.5

DEFAULT_TIMERS = Timers()


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Bounds and timers of a socket that carries messages of the protocol."""

    domain: SecurityDomain = SecurityDomain.CONTROL
    """The kind of connection: decides which keys its ends must have."""
    high_water: int = 1000
    """Messages that ZeroMQ queues per peer for sending and, on sockets without heartbeats, for receiving."""
    max_frame_bytes: int = 8_388_608
    """A peer that sends a larger frame is disconnected."""
    outbox_messages: int = 10_000
    """Messages queued for a full peer, in addition to ZeroMQ's own queue."""
    outbox_bytes: int = 268_435_456
    heartbeat_s: float = 1.0
    """0: no heartbeats, and no connection is closed for silence."""
    heartbeat_timeout_s: float = 3.0
    """Also the timeout of a handshake."""
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 2.0
    zero_copy: bool = False
    """Send frames without a copy and receive memoryviews: for KV. Faster for frames of 64 KiB and more."""

    @classmethod
    def control(cls, limits: Limits, timers: Timers = DEFAULT_TIMERS) -> "SocketOptions":
        return cls(
            high_water=limits.control_high_water,
            max_frame_bytes=max(limits.header_max_bytes, limits.job_token_ids_max_bytes) + OVERHEAD_BYTES,
            outbox_messages=limits.outbox_messages,
            heartbeat_s=timers.link_heartbeat_s,
            heartbeat_timeout_s=timers.link_timeout_s,
            reconnect_min_s=timers.reconnect_min_s,
            reconnect_max_s=timers.reconnect_max_s,
        )

    @classmethod
    def kv(
        cls, limits: Limits, high_water: int, timers: Timers = DEFAULT_TIMERS, *, stall_s: float = 0.0
    ) -> "SocketOptions":
        """For KV sockets: few large messages. `stall_s`: at the sending end, the least silence before it disconnects.

        The receiver must close a silent connection first. If the sender reconnected while the receiver still had the
        old connection, late bytes on the old one would abort the receiver's process (ADR 0022).
        """
        return cls(
            domain=SecurityDomain.KV,
            high_water=high_water,
            max_frame_bytes=max(limits.header_max_bytes, limits.piece_max_bytes),
            zero_copy=True,
            heartbeat_s=timers.link_heartbeat_s,
            heartbeat_timeout_s=max(timers.link_timeout_s, stall_s),
            reconnect_min_s=timers.reconnect_min_s,
            reconnect_max_s=timers.reconnect_max_s,
        )


def apply(socket: "zmq.Socket[bytes]", options: SocketOptions) -> None:
    """Set the options that are the same for all socket types."""
    socket.setsockopt(zmq.SNDHWM, options.high_water)
    socket.setsockopt(zmq.RCVHWM, options.high_water)
    socket.setsockopt(zmq.MAXMSGSIZE, options.max_frame_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, _ms(options.reconnect_min_s))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _ms(options.reconnect_max_s))
    socket.setsockopt(zmq.HANDSHAKE_IVL, _ms(options.heartbeat_timeout_s))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def bind(
    context: TransportContext,
    socket: "zmq.Socket[bytes]",
    endpoint: str,
    options: SocketOptions,
    *,
    allow_remote: bool,
) -> str:
    """Bind, and return the endpoint with its real port and, if it has one, its key. ConfigError when that fails.

    Without keys, an address that other hosts can reach is refused unless `allow_remote` is set.
    """
    parsed, domain = parse_endpoint(endpoint), options.domain
    security = context.security
    protected = security is not None and security.protects(domain, parsed.scheme)
    if not parsed.is_local and not protected:
        if not allow_remote:
            raise ConfigError(
                f"cannot bind {endpoint}: other hosts can reach it and no keys are configured; bind a loopback "
                "address, configure [security], or set allow_remote"
            )
        context.warn_exposed(endpoint)
    if parsed.scheme == "ipc" and probe(endpoint, _IPC_PROBE_S) is ProbeResult.ACCEPTED:
        # ZeroMQ would replace the other process' socket file without an error.
        raise ConfigError(f"cannot bind {endpoint}: another process listens there")
    if protected:
        context.secure_server(socket, domain)
    _enable_heartbeats(socket, parsed, options)
    try:
        socket.setsockopt(zmq.IPV6, 1 if ":" in parsed.host and parsed.scheme == "tcp" else 0)
        socket.bind(_bind_address(parsed))
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot bind {endpoint}: {error.strerror}") from None
    if parsed.scheme == "ipc":
        context.track_ipc_file(socket, parsed.host)
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    return with_key(bound, security.public) if security is not None and protected else bound


def connect(context: TransportContext, socket: "zmq.Socket[bytes]", endpoint: str, options: SocketOptions) -> str:
    """Connect, and return the address to disconnect with. ConfigError when nothing can connect to this endpoint."""
    domain = options.domain
    parsed = check_connectable(context, endpoint, domain)
    _enable_heartbeats(socket, parsed, options)
    if context.security is not None and context.security.protects(domain, parsed.scheme):
        context.security.secure_client(socket, domain, parsed)
    try:
        if parsed.scheme == "tcp":
            socket.setsockopt(zmq.IPV6, 1 if _is_ipv6(parsed.host) else 0)
        address = _address(parsed, parsed.host)
        socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}") from None
    return address


def _enable_heartbeats(socket: "zmq.Socket[bytes]", endpoint: Endpoint, options: SocketOptions) -> None:
    """Enable heartbeats and, with them, remove the receive high-water mark. Does nothing for `inproc`.

    ZeroMQ aborts the process when a heartbeat is due on a connection that broke while reading was paused (libzmq's
    `!_io_error`, issues 3937 and 4364), and a full receive queue pauses reading. The protocol bounds what arrives: KV
    by windows, and silent peers are dropped.
    """
    if not options.heartbeat_s or endpoint.scheme == "inproc":
        return
    socket.setsockopt(zmq.HEARTBEAT_IVL, _ms(options.heartbeat_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(options.heartbeat_timeout_s))
    if socket.getsockopt(zmq.RCVHWM):  # setting it twice would touch pipes that are terminating: a crash
        socket.setsockopt(zmq.RCVHWM, 0)


def check_connectable(context: TransportContext, endpoint: str, domain: SecurityDomain) -> Endpoint:
    """Parse an endpoint to connect to. ConfigError when it is invalid, a wildcard, or its key is not allowed."""
    parsed = parse_endpoint(endpoint)
    if parsed.is_wildcard or parsed.port == 0:
        raise ConfigError(f"cannot connect to {endpoint}: it is a wildcard; give the host and the port of the peer")
    try:
        if context.security is not None and context.security.protects(domain, parsed.scheme):
            context.security.check_server(domain, parsed)
        elif parsed.key:
            raise ConfigError("the endpoint names a key, but this process has no keys; configure [security]")
    except ConfigError as error:
        raise ConfigError(f"cannot connect to {endpoint}: {error}") from None
    return parsed


def _bind_address(endpoint: Endpoint) -> str:
    # ZeroMQ accepts only interface names and numeric addresses to bind; a host name would be "no such device".
    return _address(endpoint, "127.0.0.1" if endpoint.host == "localhost" else endpoint.host)


def _address(endpoint: Endpoint, host: str) -> str:
    if endpoint.scheme != "tcp":
        return f"{endpoint.scheme}://{endpoint.host}"
    bracketed = f"[{host}]" if ":" in host else host
    return f"tcp://{bracketed}:{endpoint.port or '*'}"


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


_NEVER_S = 1_000_000.0

# The ranks of a node are processes of one host that start and end together. A rank's death is detected through its
# process, so no heartbeat closes a connection: a rank that was suspended and resumes has lost no message.
RANK_OPTIONS = SocketOptions(
    high_water=100_000,
    max_frame_bytes=268_435_456,
    heartbeat_s=0.0,
    heartbeat_timeout_s=_NEVER_S,
    reconnect_min_s=0.01,
    reconnect_max_s=0.1,
)
"""For sockets between the ranks of a node. Batches and commands are small, and a rank that does not read them stalls
the node's engine, which is detected."""


_WANTED = ("curve", "ipc")


def zmq_features() -> tuple[bool, str]:
    """(whether ZeroMQ has all optional features that kvferry uses, a one-line description)."""
    missing = [name for name in _WANTED if not zmq.has(name)]
    text = f"libzmq {zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}"
    if missing:
        advice = "; keys need CURVE: bind loopback only, or install pyzmq's binary wheel" if "curve" in missing else ""
        return False, f"{text}, built without {' and '.join(missing)}{advice}"
    return True, f"{text}, built with {' and '.join(_WANTED)}: [security] can be used"
