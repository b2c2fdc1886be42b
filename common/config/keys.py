"""Reads key files and reports errors with file and line. Does not use ZeroMQ and generates no keys.

One line per key: `public ROLE HEX` in a list of allowed keys, `secret ROLE HEX` in a file of its own. The role is in
the line, not in the file name, so that renaming a file grants nothing. The 32 bytes are in hexadecimal, because they
are also written in endpoints, where ZeroMQ's own Z85 would need quoting.
"""

import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.endpoints import is_key

KeyRole = Literal["node", "router"]
KEY_ROLES: tuple[KeyRole, ...] = get_args(KeyRole)
PUBLIC_SUFFIX = ".pub"

_Kind = Literal["public", "secret"]
_Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Key:
    """A public or a secret key."""

    role: KeyRole
    hex: str
    """32 bytes as 64 lower-case hexadecimal digits."""


def key_line(kind: _Kind, key: Key) -> str:
    """The line for a key in a key file."""
    return f"{kind} {key.role} {key.hex}"


def read_secret(name: str, path: Path, role: KeyRole) -> Key:
    """The secret key in a file. Raises as `read_secret_file` does, and ConfigError when the key has another role."""
    key = read_secret_file(name, path)
    if key.role != role:
        raise ConfigError(f"{name}: {path} has a {key.role} key; expected a {role} key")
    return key


def read_secret_file(name: str, path: Path) -> Key:
    """The secret key in a file. ConfigError, starting with `name`, when it is invalid or other users can read it."""
    keys = _parse(name, path, _read(name, path), "secret")
    if len(keys) != 1:
        raise ConfigError(f"{name}: {path} has {len(keys)} secret keys; expected exactly one")
    if os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{name}: {path} is accessible to other users; run: chmod 600 {path}")
    return keys[0]


class AllowedKeys:
    """The public keys of `security.allowed_keys`, read again when the files change. Thread-safe.

    A removed key is refused from then on, but established connections are not closed. If the files become unreadable
    or invalid, the previous list stays in use and `error` gives the reason.
    """

    def __init__(self, name: str, path: Path) -> None:
        """ConfigError when the files cannot be read or are invalid."""
        self._name = name
        self._path = path
        self._lock = threading.Lock()
        self._signature = _signature(name, path)
        self._keys = _read_allowed(name, path)
        self.error = ""

    def roles_of(self, hex_key: str) -> frozenset[KeyRole]:
        """The roles of this key; empty when it is not allowed."""
        return frozenset(key.role for key in self._current() if key.hex == hex_key)

    def of_role(self, role: KeyRole) -> tuple[str, ...]:
        """All keys of a role, in hexadecimal, sorted."""
        return tuple(sorted(key.hex for key in self._current() if key.role == role))

    def _current(self) -> frozenset[Key]:
        with self._lock:
            try:
                signature = _signature(self._name, self._path)
                if signature != self._signature:
                    self._keys = _read_allowed(self._name, self._path)
                    self._signature = signature
                self.error = ""
            except ConfigError as error:
                self.error = str(error)
            return self._keys


def _signature(name: str, path: Path) -> _Signature:
    """A value that changes when any of the files does."""
    try:
        stats = [(str(file), os.stat(file)) for file in _files(path)]
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from None
    return tuple((file, found.st_mtime_ns, found.st_size, found.st_ino) for file, found in stats)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(path / entry for entry in os.listdir(path) if entry.endswith(PUBLIC_SUFFIX))


def _read_allowed(name: str, path: Path) -> frozenset[Key]:
    try:
        files = _files(path)
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from None
    return frozenset(key for file in files for key in _parse(name, file, _read(name, file), "public"))


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {path} is not a key file: it contains non-ASCII bytes") from None


def _parse(name: str, path: Path, text: str, kind: _Kind) -> list[Key]:
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{name}: {path}, line {number}"
        if len(words) != 3 or words[0] not in ("public", "secret"):
            raise ConfigError(f"{where}: expected `{kind} node|router KEY`")
        if words[0] != kind:
            raise ConfigError(f"{where}: expected a {kind} key, got a {words[0]} key")
        role = next((role for role in KEY_ROLES if role == words[1]), None)
        if role is None:
            raise ConfigError(f"{where}: unknown role {words[1]!r}; expected {' or '.join(KEY_ROLES)}")
        if not is_key(words[2]):
            raise ConfigError(f"{where}: expected 64 lower-case hexadecimal digits, got {len(words[2])} characters")
        keys.append(Key(role, words[2]))
    return keys
