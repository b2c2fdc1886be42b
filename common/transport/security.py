"""CURVE keys on sockets: whose secret a socket has, whom it lets in, and whom it believes to have reached.

Belongs to a TransportContext, which starts the ZAP handler before the first bind. ZeroMQ without a handler would let
any key in; the domain is enforced, so that here it lets nobody in.
"""

import logging
from pathlib import Path

import zmq
from zmq.utils import z85

from kvferry.common.base.errors import (
    ConfigError,
    InvariantError,
)
from kvferry.common.config.endpoints import Endpoint, parse_endpoint, with_key
from kvferry.common.config.keys import AllowedKeys, Key, KeyRole, read_secret
from kvferry.common.config.schema import SecurityConfig
from kvferry.common.transport.security_domain import Channel

_LOG = logging.getLogger("kvferry.security")


class Security:
    """One process' keys. Thread-safe: what changes is the list of allowed keys alone, which is so itself."""

    def __init__(self, secret: Key, allowed: AllowedKeys, *, kv: bool = True) -> None:
        """ConfigError when ZeroMQ cannot do it, or when this process' own key is not in the list."""
        if not zmq.has("curve"):
            raise ConfigError("security: this libzmq was built without CURVE; install pyzmq's own wheel")
        self.role = secret.role
        self.allowed = allowed
        self._kv = kv
        self._told_error = ""
        self._secret = _z85(secret.hex)
        self._public = zmq.curve_public(self._secret)
        self.public = z85.decode(self._public).hex()
        """This process' public key, in hexadecimal."""
        if self.role not in allowed.roles_of(self.public):
            raise ConfigError(
                f"security.allowed_keys: it lacks this process' own key, public {self.role} {self.public}: its peers, "
                "which have the same list, would not let it in"
            )

    def protects(self, channel: Channel, scheme: str) -> bool:
        """Whether such a socket has keys: `inproc` needs none, and KV may be without."""
        return scheme != "inproc" and (self._kv or channel is not Channel.KV)

    def secure_server(self, socket: "zmq.Socket[bytes]", channel: Channel) -> None:
        """For a socket that binds: whom `admits` names may speak to it, nobody else."""
        if channel.server != self.role:
            raise InvariantError(f"a {self.role} binds no {channel.value} socket")
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, channel.value.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: "zmq.Socket[bytes]", channel: Channel, endpoint: Endpoint) -> None:
        """For a socket that connects. ConfigError as `check_server` has it."""
        self.check_server(channel, endpoint)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, _z85(endpoint.key))

    def check_server(self, channel: Channel, endpoint: Endpoint) -> None:
        """ConfigError when the endpoint names no key, or one that may not be at the other end of such a connection."""
        if not endpoint.key:
            raise ConfigError("its endpoint names no key (?key=...): the process there runs without keys")
        if channel.server not in self.allowed.roles_of(endpoint.key):
            raise ConfigError(f"its key {endpoint.key} is no {channel.server}'s in security.allowed_keys")

    def admits(self, domain: str, key: bytes) -> bool:
        """Whether who proved to have this key may use that kind of socket."""
        admitted = any(
            domain == channel.value and channel.clients & self.allowed.roles_of(key.hex()) for channel in Channel
        )
        error = self.allowed.error
        if error and error != self._told_error:
            _LOG.error("the allowed keys stay as they were: %s", error)
        self._told_error = error
        return admitted

    def completed(self, name: str, endpoints: tuple[str, ...], role: KeyRole) -> tuple[str, ...]:
        """Endpoints of the configuration, each with a key: its own, or the only one that the list has for `role`.

        ConfigError, beginning with the configuration's key `name`, when there is a choice, or none.
        """
        return tuple(self._completed(name, endpoint, role) for endpoint in endpoints)

    def _completed(self, name: str, text: str, role: KeyRole) -> str:
        endpoint = parse_endpoint(text)
        if endpoint.scheme == "inproc":
            return text
        if endpoint.key:
            if role not in self.allowed.roles_of(endpoint.key):
                raise ConfigError(f"{name}: {text}: this key is no {role}'s in security.allowed_keys")
            return text
        keys = self.allowed.of_role(role)
        if len(keys) != 1:
            raise ConfigError(
                f"{name}: {text}: say which key is there with ?key=...: security.allowed_keys has {len(keys)} of the "
                f"role {role}"
            )
        return with_key(text, keys[0])


def load_security(config: SecurityConfig, role: KeyRole) -> Security | None:
    """The keys of a process of this role; None where none are configured. ConfigError says what is wrong with them."""
    if not config.is_on:
        return None
    name = f"security.{role}_key_file"
    path = config.node_key_file if role == "node" else config.router_key_file
    if not path:
        raise ConfigError(f"{name}: needed, for keys are configured and a {role} runs here")
    secret = read_secret(name, Path(path), role)
    return Security(secret, AllowedKeys("security.allowed_keys", Path(config.allowed_keys)), kv=config.kv == "on")


def new_pair(role: KeyRole) -> tuple[Key, Key]:
    """A fresh (public, secret) pair. ConfigError when ZeroMQ cannot do it."""
    if not zmq.has("curve"):
        raise ConfigError("this libzmq was built without CURVE; install pyzmq's own wheel")
    public, secret = zmq.curve_keypair()
    return Key(role, z85.decode(public).hex()), Key(role, z85.decode(secret).hex())


def public_of(secret: Key) -> Key:
    """The public half that belongs to a secret one."""
    return Key(secret.role, z85.decode(zmq.curve_public(_z85(secret.hex))).hex())


def _z85(hex_key: str) -> bytes:
    return z85.encode(bytes.fromhex(hex_key))
