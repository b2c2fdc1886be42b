"""Key files: errors name the file and the line, and a changed list is read again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.keys import AllowedKeys, Key, key_line, read_secret

ONE, TWO = Key("node", "1a" * 32), Key("router", "2b" * 32)


def secret_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "a.secret"
    file.write_text(text)
    file.chmod(mode)
    return file


def allow(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.pub").write_text(text + "\n")


def test_a_secret_is_read_back(tmp_path: Path):
    file = secret_file(tmp_path, f"# made today\n\n{key_line('secret', ONE)}  # ours\n")
    assert read_secret("security.node_key_file", file, "node") == ONE


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (key_line("secret", ONE), 0o640, "accessible to other users"),
        (key_line("secret", ONE), 0o604, "accessible to other users"),
        (key_line("secret", TWO), 0o600, "has a router key; expected a node key"),
        (key_line("public", ONE), 0o600, "line 1: expected a secret key, got a public key"),
        (f"secret node {'1a' * 31}", 0o600, "line 1: expected 64 lower-case hexadecimal digits, got 62 characters"),
        (f"secret node {'1A' * 32}", 0o600, "line 1: expected 64 lower-case hexadecimal digits"),
        (f"\nsecret client {'1a' * 32}", 0o600, "line 2: unknown role 'client'; expected node or router"),
        ("hello", 0o600, "line 1: expected `secret node|router KEY`"),
        ("", 0o600, "has 0 secret keys; expected exactly one"),
        (f"{key_line('secret', ONE)}\n{key_line('secret', ONE)}", 0o600, "has 2 secret keys; expected exactly one"),
        ("é", 0o600, "contains non-ASCII bytes"),
    ],
)
def test_an_invalid_secret_file_is_refused(tmp_path: Path, text: str, mode: int, words: str):
    file = secret_file(tmp_path, text, mode)
    with pytest.raises(ConfigError) as caught:
        read_secret("security.node_key_file", file, "node")
    assert str(caught.value).startswith(f"security.node_key_file: {file}")
    assert words in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path):
    for read in (
        lambda path: read_secret("security.node_key_file", path, "node"),
        lambda path: AllowedKeys("security.node_key_file", path),
    ):
        with pytest.raises(ConfigError, match=r"security.node_key_file: .*none: No such file"):
            read(tmp_path / "none")


def test_a_list_is_a_directory_or_a_file(tmp_path: Path):
    folder = tmp_path / "allowed"
    folder.mkdir()
    allow(folder, "n", key_line("public", ONE))
    allow(folder, "r", key_line("public", TWO))
    (folder / "README").write_text("not a key")
    file = tmp_path / "all"
    file.write_text(f"{key_line('public', ONE)}\n{key_line('public', TWO)}\n")
    for path in (folder, file):
        allowed = AllowedKeys("security.allowed_keys", path)
        assert allowed.roles_of(ONE.hex) == {"node"}
        assert allowed.roles_of(TWO.hex) == {"router"}
        assert allowed.roles_of("00" * 32) == frozenset()
        assert allowed.of_role("router") == (TWO.hex,)


def test_a_secret_in_the_list_is_refused(tmp_path: Path):
    allow(tmp_path, "n", key_line("secret", ONE))
    with pytest.raises(ConfigError, match=r"n\.pub, line 1: expected a public key, got a secret key"):
        AllowedKeys("security.allowed_keys", tmp_path)


def test_a_list_is_read_again_when_it_changes(tmp_path: Path):
    allow(tmp_path, "n", key_line("public", ONE))
    allowed = AllowedKeys("security.allowed_keys", tmp_path)
    allow(tmp_path, "r", key_line("public", TWO))
    assert allowed.roles_of(TWO.hex) == {"router"}
    (tmp_path / "n.pub").unlink()
    assert allowed.roles_of(ONE.hex) == frozenset()
    (tmp_path / "r.pub").unlink()
    assert allowed.of_role("router") == ()


@pytest.mark.parametrize("damage", [lambda path: allow(path, "x", "public"), lambda path: path.rename(f"{path}-away")])
def test_an_invalid_change_leaves_the_list_in_use(tmp_path: Path, damage: Callable[[Path], object]):
    folder = tmp_path / "allowed"
    folder.mkdir()
    allow(folder, "n", key_line("public", ONE))
    allowed = AllowedKeys("security.allowed_keys", folder)
    damage(folder)
    assert allowed.roles_of(ONE.hex) == {"node"}
    assert allowed.error.startswith("security.allowed_keys: ")


def test_a_repaired_list_has_no_error(tmp_path: Path):
    allow(tmp_path, "n", key_line("public", ONE))
    allowed = AllowedKeys("security.allowed_keys", tmp_path)
    allow(tmp_path, "r", "public router")
    assert allowed.roles_of(ONE.hex) == {"node"}
    assert allowed.error
    allow(tmp_path, "r", key_line("public", TWO))
    assert allowed.roles_of(TWO.hex) == {"router"}
    assert allowed.error == ""
