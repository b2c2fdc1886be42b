"""`kvferry keys`: the files work without changes, and no file is replaced."""

import stat
from pathlib import Path

import pytest

from kvferry.common.config.keys import KEY_ROLES, AllowedKeys, read_secret
from kvferry.common.config.schema import SecurityConfig
from kvferry.common.transport.security import load_security
from kvferry.ops.cli.main import main


def test_new_keys_work_without_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "keys"
    assert main(["keys", "new", str(folder)]) == 0
    out = capsys.readouterr().out
    for role in ("node", "router"):
        secret = folder / f"{role}.secret"
        assert f"{secret}  keep it secret; copy it only to hosts whose {role}s use it\n" in out
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    config = SecurityConfig(
        allowed_keys=str(folder / "allowed"),
        node_key_file=str(folder / "node.secret"),
        router_key_file=str(folder / "router.secret"),
    )
    for role in KEY_ROLES:
        security = load_security(config, role)
        assert security is not None
        assert main(["keys", "public", str(folder / f"{role}.secret")]) == 0
        assert capsys.readouterr().out == f"public {role} {security.public}\n"
        assert (folder / "allowed" / f"{role}.pub").read_text() == f"public {role} {security.public}\n"


def test_no_file_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["keys", "new", str(tmp_path)]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "node.secret").unlink()
    assert main(["keys", "new", str(tmp_path)]) == 2
    assert "node.pub exists already" in capsys.readouterr().err
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == {path: text for path, text in before.items() if path.name != "node.secret"}


def test_another_key_of_a_role_can_be_made(tmp_path: Path):
    assert main(["keys", "new", str(tmp_path)]) == 0
    assert main(["keys", "new", str(tmp_path), "--role", "node", "--name", "node-b"]) == 0
    assert read_secret("x", tmp_path / "node-b.secret", "node").role == "node"
    assert len(AllowedKeys("x", tmp_path / "allowed").of_role("node")) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new", "{}", "--name", "a"], "--name requires --role"),
        (["new", "{}", "--role", "node", "--name", "a/b"], "--name: 'a/b' is not a file name"),
        (["new", "{}", "--role", "node", "--name", ""], "--name: '' is not a file name"),
        (["public", "{}/none"], "FILE: {}/none: No such file or directory"),
    ],
)
def test_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    assert main(["keys", *(word.format(tmp_path) for word in words)]) == 2
    assert message.format(tmp_path) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    assert main(["keys", "new", str(tmp_path / "file" / "keys")]) == 2
    assert "error: DIR: " in capsys.readouterr().err
