"""Keys for tests: a directory of real key files in the layout of `kvferry keys new`, and settings that use them."""

import os
from pathlib import Path

from kvferry.common.config.keys import Key, KeyRole, key_line
from kvferry.common.config.schema import SecurityConfig
from kvferry.common.transport.security import Security, load_security, new_pair


class KeyRing:
    """Key files in a directory. Creates and allows a key of each role."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.allowed = folder / "allowed"
        self.allowed.mkdir(parents=True)
        self.public = {role: self.add(role, role) for role in ("node", "router")}

    def add(self, name: str, role: KeyRole, *, allowed: bool = True) -> Key:
        """Create a pair of this role; returns its public key."""
        public, secret = new_pair(role)
        with os.fdopen(os.open(self.secret_file(name), os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(key_line("secret", secret) + "\n")
        if allowed:
            self.allow(name, public)
        return public

    def allow(self, name: str, public: Key) -> None:
        """Add a key to the list."""
        (self.allowed / f"{name}.pub").write_text(key_line("public", public) + "\n")

    def forbid(self, name: str) -> None:
        """Remove a key from the list."""
        (self.allowed / f"{name}.pub").unlink()

    def secret_file(self, name: str) -> Path:
        """The file of a secret key."""
        return self.folder / f"{name}.secret"

    def config(self, role: KeyRole, name: str = "", *, kv: bool = True) -> SecurityConfig:
        """The [security] section of a process with this key."""
        path = str(self.secret_file(name or role))
        return SecurityConfig(
            allowed_keys=str(self.allowed),
            node_key_file=path if role == "node" else "",
            router_key_file=path if role == "router" else "",
            kv="on" if kv else "off",
        )

    def settings(self) -> dict[str, object]:
        """`--set` keys and values for a whole cluster."""
        return {
            "security.allowed_keys": self.allowed,
            "security.node_key_file": self.secret_file("node"),
            "security.router_key_file": self.secret_file("router"),
        }

    def security(self, role: KeyRole, name: str = "", *, kv: bool = True) -> Security:
        security = load_security(self.config(role, name, kv=kv), role)
        assert security is not None
        return security
