"""Key files: what they look like, and reading them with all that may be wrong told. Knows no ZeroMQ, draws no key.

One line a key: `public ROLE HEX` in a list of allowed keys, `secret ROLE HEX` in a file of its own. The role is in the
line, not in the file's name, so that renaming a file grants nothing; the 32 bytes are in hexadecimal, so that the same
word can stand in an endpoint, where ZeroMQ's own Z85 would need quoting.
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
    """One half of a pair."""

    role: KeyRole
    hex: str
    """32 bytes as 64 lower-case digits."""


def key_line(kind: _Kind, key: Key) -> str:
    """The line of a key file."""
    return f"{kind} {key.role} {key.hex}"


def read_secret(name: str, path: Path, role: KeyRole) -> Key:
    """The secret key in a file, which must be this role's; else as `read_secret_file`."""
    key = read_secret_file(name, path)
    if key.role != role:
        raise ConfigError(f"{name}: {path} is the key of a {key.role}; a {role}'s is needed")
    return key


def read_secret_file(name: str, path: Path) -> Key:
    """The secret key in a file. ConfigError, beginning with `name`, when it is none or others can read it."""
    keys = _parse(name, path, _read(name, path), "secret")
    if len(keys) != 1:
        raise ConfigError(f"{name}: {path} has {len(keys)} secret keys; expected one")
    if os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{name}: {path} is open to others, so its key is no secret: chmod 600 it")
    return keys[0]


class AllowedKeys:
    """The public keys of `security.allowed_keys`, read again when the files change. From any thread.

    A key that is taken out is not let in again; connections that stand are not cut. What cannot be read any more, or is
    wrong, leaves the list as it was, and `error` says why.
    """

    def __init__(self, name: str, path: Path) -> None:
        """ConfigError when there is nothing to read, or something in it is wrong."""
        self._name = name
        self._path = path
        self._lock = threading.Lock()
        self._signature = _signature(name, path)
        self._keys = _read_allowed(name, path)
        self.error = ""

    def roles_of(self, hex_key: str) -> frozenset[KeyRole]:
        """What this key may be; empty for a stranger's."""
        return frozenset(key.role for key in self._now() if key.hex == hex_key)

    def of_role(self, role: KeyRole) -> tuple[str, ...]:
        """All keys of a role, in hexadecimal, sorted."""
        return tuple(sorted(key.hex for key in self._now() if key.role == role))

    def _now(self) -> frozenset[Key]:
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
    """Changes whenever a file does."""
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
        raise ConfigError(f"{name}: {path} is no key file: it is not ASCII") from None


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
            raise ConfigError(f"{where}: a {words[0]} key where a {kind} one is expected")
        role = next((role for role in KEY_ROLES if role == words[1]), None)
        if role is None:
            raise ConfigError(f"{where}: {words[1]!r} is no role; there are {' and '.join(KEY_ROLES)}")
        if not is_key(words[2]):
            raise ConfigError(f"{where}: expected 64 hexadecimal digits, got {len(words[2])} characters")
        keys.append(Key(role, words[2]))
    return keys
