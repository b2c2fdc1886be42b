"""The kinds of connection, and the roles whose keys each end must have. Pure."""

from enum import Enum

from kvferry.common.config.keys import KeyRole


class SecurityDomain(Enum):
    """A kind of connection. The value is the ZAP domain."""

    CONTROL = "control"
    """Router workers and prefill nodes to a node's control endpoint."""
    KV = "kv"
    """Prefill nodes to a decode node's KV endpoint."""
    ANNOUNCE = "announce"
    """Nodes to the proxy of a router host."""
    MEMBERS = "members"
    """Router workers to the proxy of their own host."""

    @property
    def server_role(self) -> KeyRole:
        """The role whose key the binding end has."""
        return "node" if self in (SecurityDomain.CONTROL, SecurityDomain.KV) else "router"

    @property
    def client_roles(self) -> frozenset[KeyRole]:
        """The roles whose keys may connect. A router's key moves no KV and announces no node."""
        return _CLIENT_ROLES[self]


_CLIENT_ROLES: dict[SecurityDomain, frozenset[KeyRole]] = {
    SecurityDomain.CONTROL: frozenset({"node", "router"}),
    SecurityDomain.KV: frozenset({"node"}),
    SecurityDomain.ANNOUNCE: frozenset({"node"}),
    SecurityDomain.MEMBERS: frozenset({"router"}),
}
