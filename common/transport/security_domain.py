"""What a socket is for, and so whose keys may be at its two ends. Pure."""

from enum import Enum

from kvferry.common.config.keys import KeyRole


class Channel(Enum):
    """The four kinds of connection. The value is the ZAP domain."""

    CONTROL = "control"
    """Workers and prefill nodes to a node's control endpoint."""
    KV = "kv"
    """Prefill nodes to a decode node's KV endpoint."""
    ANNOUNCE = "announce"
    """Nodes to the proxy of a router host."""
    MEMBERS = "members"
    """The proxy to the workers of its own host."""

    @property
    def server(self) -> KeyRole:
        """Whose key who binds has."""
        return "node" if self in (Channel.CONTROL, Channel.KV) else "router"

    @property
    def clients(self) -> frozenset[KeyRole]:
        """Whose keys are let in. A router's key moves no KV and announces no node."""
        return _CLIENTS[self]


_CLIENTS: dict[Channel, frozenset[KeyRole]] = {
    Channel.CONTROL: frozenset({"node", "router"}),
    Channel.KV: frozenset({"node"}),
    Channel.ANNOUNCE: frozenset({"node"}),
    Channel.MEMBERS: frozenset({"router"}),
}
