"""How every socket is set up: high-water marks, heartbeats, sizes, and which addresses may be bound. Opens nothing.

How sockets between the ranks of one node are set up. They are processes of one host that live and die together.

Whether a rank lives is told by its process, so no heartbeat ends a connection: a rank that was stopped for a while and
goes on has lost no message.

What the ZeroMQ library of this machine can do; for `kvferry doctor`. Opens nothing.
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
from kvferry.common.transport.security_domain import Channel

_IPC_PROBE_S = 0.5


DEFAULT_TIMERS = Timers()


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Bounds and timers of a socket that carries messages of the protocol."""

    channel: Channel = Channel.CONTROL
    """What it is for: decides whose keys are at its ends."""
    high_water: int = 1000
    """Messages that ZeroMQ keeps for a peer; of those that come, too, where there are no heartbeats."""
    max_frame_bytes: int = 8_388_608
    """A peer that sends a larger frame is disconnected."""
    outbox_messages: int = 10_000
    """Messages kept for a peer that is full, after ZeroMQ's own."""
    outbox_bytes: int = 268_435_456
    heartbeat_s: float = 1.0
    """0: none, and no connection ends by silence."""
    heartbeat_timeout_s: float = 3.0
    """For a handshake as well."""
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 2.0
    zero_copy: bool = False
    """Frames go out without a copy and come in as memoryviews: for KV bytes. Pays off from 64 KiB on."""

    @classmethod
    def control(cls, limits: Limits, timers: Timers = DEFAULT_TIMERS) -> "SocketOptions":
        """For control sockets."""
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
        """For KV sockets: few large messages. `stall_s`: of the end that sends, which bears a silence no shorter.

        The receiver is to end a silent connection first. A sender that connects anew beside one that lives there, and
        late bytes on that one, would end the receiver's process (ADR 0022).
        """
        return cls(
            channel=Channel.KV,
            high_water=high_water,
            max_frame_bytes=max(limits.header_max_bytes, limits.piece_max_bytes),
            zero_copy=True,
            heartbeat_s=timers.link_heartbeat_s,
            heartbeat_timeout_s=max(timers.link_timeout_s, stall_s),
            reconnect_min_s=timers.reconnect_min_s,
            reconnect_max_s=timers.reconnect_max_s,
        )


def apply(socket: "zmq.Socket[bytes]", options: SocketOptions) -> None:
    """Everything that does not depend on the socket's kind."""
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
    """Bind, and return the endpoint with its real port, and its key if it has one. ConfigError when it may not be.

    Without keys an address that other hosts reach is refused, unless `allow_remote` says it is wanted.
    """
    parsed, channel = parse_endpoint(endpoint), options.channel
    security = context.security
    protected = security is not None and security.protects(channel, parsed.scheme)
    if not parsed.is_local and not protected:
        if not allow_remote:
            raise ConfigError(
                f"{endpoint} can be reached from other hosts and there are no keys: bind a loopback address, configure "
                "keys, or allow it on purpose"
            )
        context.tell_exposed(endpoint)
    if parsed.scheme == "ipc" and probe(endpoint, _IPC_PROBE_S) is ProbeResult.ACCEPTED:
        raise ConfigError(f"cannot bind {endpoint}: another process listens there")  # ZeroMQ would take it over
    if protected:
        context.secure_server(socket, channel)
    _beat(socket, parsed, options)
    try:
        socket.setsockopt(zmq.IPV6, 1 if ":" in parsed.host and parsed.scheme == "tcp" else 0)
        socket.bind(_bind_address(parsed))
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot bind {endpoint}: {error.strerror}") from None
    if parsed.scheme == "ipc":
        context.own_file(socket, parsed.host)
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    return with_key(bound, security.public) if security is not None and protected else bound


def connect(context: TransportContext, socket: "zmq.Socket[bytes]", endpoint: str, options: SocketOptions) -> str:
    """Connect, and return the address to disconnect with. ConfigError when it is no address to connect to."""
    channel = options.channel
    parsed = check_connectable(context, endpoint, channel)
    _beat(socket, parsed, options)
    if context.security is not None and context.security.protects(channel, parsed.scheme):
        context.security.secure_client(socket, channel, parsed)
    try:
        if parsed.scheme == "tcp":
            socket.setsockopt(zmq.IPV6, 1 if _is_ipv6(parsed.host) else 0)
        address = _address(parsed, parsed.host)
        socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}") from None
    return address


def _beat(socket: "zmq.Socket[bytes]", endpoint: Endpoint, options: SocketOptions) -> None:
    """Heartbeats, and no receive mark with them. Neither within a process.

    ZeroMQ ends the process when a heartbeat is due on a connection that broke while its reading was stopped (libzmq's
    `!_io_error`, issues 3937 and 4364), and a full mark stops it. What comes is bounded by the protocol: by windows for
    KV, and by peers that are given up when they are silent.
    """
    if not options.heartbeat_s or endpoint.scheme == "inproc":
        return
    socket.setsockopt(zmq.HEARTBEAT_IVL, _ms(options.heartbeat_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(options.heartbeat_timeout_s))
    if socket.getsockopt(zmq.RCVHWM):  # to set it again would reach for pipes that are coming to their end: a crash
        socket.setsockopt(zmq.RCVHWM, 0)


def check_connectable(context: TransportContext, endpoint: str, channel: Channel) -> Endpoint:
    """Parse an endpoint to connect to. ConfigError when it is none, stands for any address or port, or by its key."""
    parsed = parse_endpoint(endpoint)
    if parsed.is_wildcard or parsed.port == 0:
        raise ConfigError(f"{endpoint} is no address that can be connected to")
    try:
        if context.security is not None and context.security.protects(channel, parsed.scheme):
            context.security.check_server(channel, parsed)
        elif parsed.key:
            raise ConfigError("its endpoint names a key, and this process has none for it")
    except ConfigError as error:
        raise ConfigError(f"cannot connect to {endpoint}: {error}") from None
    return parsed


def _bind_address(endpoint: Endpoint) -> str:
    # ZeroMQ looks a bind host up among interfaces and numeric addresses only; a name would be "no such device".
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

RANK_OPTIONS = SocketOptions(
    high_water=100_000,
    max_frame_bytes=268_435_456,
    heartbeat_s=0.0,
    heartbeat_timeout_s=_NEVER_S,
    reconnect_min_s=0.01,
    reconnect_max_s=0.1,
)
"""Plans and commands are small, and a rank that does not take them stops the node's engine, which is noticed."""


_WANTED = ("curve", "ipc")


def zmq_features() -> tuple[bool, str]:
    """(whether all that may be wanted is there, one line about it)."""
    missing = [name for name in _WANTED if not zmq.has(name)]
    text = f"libzmq {zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}"
    if missing:
        advice = "; no keys: loopback only, or pyzmq's own wheel" if "curve" in missing else ""
        return False, f"{text}, built without {' and '.join(missing)}{advice}"
    return True, f"{text}, with {' and '.join(_WANTED)}: [security] can be used"
