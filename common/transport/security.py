"""CURVE keys on sockets: a socket's own secret, the client keys it admits, and the server key it expects.

Belongs to a TransportContext, which starts the ZAP handler before the first bind. Without a handler ZeroMQ would admit
any key; because the ZAP domain is enforced, it admits none.
"""

import logging
from pathlib import Path

import zmq
from zmq.utils import z85

from kvferry.common.base.errors import ConfigError, InvariantError
from kvferry.common.config.endpoints import Endpoint, parse_endpoint, with_key
from kvferry.common.config.keys import AllowedKeys, Key, KeyRole, read_secret
from kvferry.common.config.schema import SecurityConfig
from kvferry.common.transport.security_domain import SecurityDomain

_LOG = logging.getLogger("kvferry.security")
_NO_CURVE = "this libzmq was built without CURVE; install pyzmq's binary wheel"


class Security:
    """The keys of one process. Thread-safe: only the list of allowed keys changes, and it is thread-safe itself."""

    def __init__(self, secret: Key, allowed: AllowedKeys, *, kv: bool = True) -> None:
        """ConfigError when libzmq lacks CURVE, or when this process' own key is not in the list."""
        if not zmq.has("curve"):
            raise ConfigError(f"security: {_NO_CURVE}")
        self.role = secret.role
        self.allowed = allowed
        self._kv = kv
        self._logged_error = ""
        self._secret = _z85(secret.hex)
        self._public = zmq.curve_public(self._secret)
        self.public = z85.decode(self._public).hex()
        """This process' public key, in hexadecimal."""
        if self.role not in allowed.roles_of(self.public):
            raise ConfigError(
                f"security.allowed_keys: this process' own key, public {self.role} {self.public}, is not in the list, "
                "so its peers, which have the same list, would refuse it; add the key to the list on every host"
            )

    def protects(self, domain: SecurityDomain, scheme: str) -> bool:
        """Whether such a socket has keys: `inproc` needs none, and KV may be configured without."""
        return scheme != "inproc" and (self._kv or domain is not SecurityDomain.KV)

    def secure_server(self, socket: "zmq.Socket[bytes]", domain: SecurityDomain) -> None:
        """Set keys on a socket that will bind: only peers that `admits` accepts can connect."""
        if domain.server_role != self.role:
            raise InvariantError(f"a {self.role} must not bind a {domain.value} socket")
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, domain.value.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: "zmq.Socket[bytes]", domain: SecurityDomain, endpoint: Endpoint) -> None:
        """Set keys on a socket that will connect. Raises ConfigError as `check_server` does."""
        self.check_server(domain, endpoint)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, _z85(endpoint.key))

    def check_server(self, domain: SecurityDomain, endpoint: Endpoint) -> None:
        """ConfigError when the endpoint names no key, or one that is not allowed at the binding end."""
        if not endpoint.key:
            raise ConfigError("the endpoint names no key (?key=...), so the process there runs without keys")
        if domain.server_role not in self.allowed.roles_of(endpoint.key):
            raise ConfigError(
                f"key {endpoint.key} is not in security.allowed_keys with the role {domain.server_role}; add it there"
            )

    def admits(self, domain: str, key: bytes) -> bool:
        """Whether a peer that owns this key may connect to a socket of this ZAP domain."""
        roles = self.allowed.roles_of(key.hex())
        admitted = any(known.value == domain and known.client_roles & roles for known in SecurityDomain)
        error = self.allowed.error
        if error and error != self._logged_error:
            _LOG.error("cannot reload the allowed keys; the previous list stays in use: %s", error)
        self._logged_error = error
        return admitted

    def completed(self, name: str, endpoints: tuple[str, ...], role: KeyRole) -> tuple[str, ...]:
        """Endpoints of the configuration, each with a key: its own, or the only key of `role` in the list.

        ConfigError, starting with the configuration key `name`, when the list has none or several of that role.
        """
        return tuple(self._completed(name, endpoint, role) for endpoint in endpoints)

    def _completed(self, name: str, text: str, role: KeyRole) -> str:
        endpoint = parse_endpoint(text)
        if endpoint.scheme == "inproc":
            return text
        if endpoint.key:
            if role not in self.allowed.roles_of(endpoint.key):
                raise ConfigError(f"{name}: {text}: the key is not in security.allowed_keys with the role {role}")
            return text
        keys = self.allowed.of_role(role)
        if len(keys) != 1:
            raise ConfigError(
                f"{name}: {text}: append ?key=... to name the key of that process: security.allowed_keys has "
                f"{len(keys)} keys of the role {role}, not exactly one"
            )
        return with_key(text, keys[0])


def load_security(config: SecurityConfig, role: KeyRole) -> Security | None:
    """The keys of a process of this role; None when no keys are configured. ConfigError when they are invalid."""
    if not config.is_on:
        return None
    name = f"security.{role}_key_file"
    path = config.node_key_file if role == "node" else config.router_key_file
    if not path:
        raise ConfigError(f"{name}: must be set, because keys are configured and a {role} runs on this host")
    secret = read_secret(name, Path(path), role)
    return Security(secret, AllowedKeys("security.allowed_keys", Path(config.allowed_keys)), kv=config.kv == "on")


def new_pair(role: KeyRole) -> tuple[Key, Key]:
    """A new (public, secret) pair. ConfigError when libzmq lacks CURVE."""
    if not zmq.has("curve"):
        raise ConfigError(_NO_CURVE)
    public, secret = zmq.curve_keypair()
    return Key(role, z85.decode(public).hex()), Key(role, z85.decode(secret).hex())


def public_of(secret: Key) -> Key:
    """The public key of a secret key."""
    return Key(secret.role, z85.decode(zmq.curve_public(_z85(secret.hex))).hex())


def _z85(hex_key: str) -> bytes:
    return z85.encode(bytes.fromhex(hex_key))
