"""Run directories: private, removed, and short enough for sockets."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from kvferry.common.base.errors import KvferryError
from kvferry.common.config.host import HostFacts
from kvferry.common.config.load import load_config
from kvferry.ops.launcher.cluster import serve_config
from kvferry.ops.launcher.run_dir import has_room_for_sockets, remove_left_over, run_base, run_directory
from tests.support.eventually import PATIENCE_S


def test_a_run_directory_is_private_and_removed(tmp_path: Path):
    with run_directory(tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "socket").touch()
        assert remove_left_over(tmp_path) == [], "its lock is held"
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_killed_run_is_removed_by_the_next(tmp_path: Path):
    code = f"""
        import os
        from pathlib import Path
        from kvferry.ops.launcher.run_dir import run_directory
        with run_directory(Path({str(tmp_path)!r})) as path:
            (path / "left").touch()
            os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=PATIENCE_S)
    assert len(list(tmp_path.glob("kvferry-*/left"))) == 1
    with run_directory(tmp_path) as path:
        assert list(tmp_path.iterdir()) == [path]


def test_the_run_directory_is_in_xdg_runtime_dir(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_base() == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert run_base() != tmp_path / "none"


def test_the_path_of_a_run_directory_leaves_space_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Binds a socket to prove it: with one character more, the next directory is used."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    length = next(number for number in range(200, 0, -1) if has_room_for_sockets(Path("/" + "a" * (number - 1))))
    longest = tmp_path / ("a" * (length - len(str(tmp_path)) - 1))
    for place, wanted in ((longest, longest), (longest.with_name(longest.name + "a"), tmp_path)):
        place.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
        with run_directory() as path:
            assert path.parent == wanted
            host = HostFacts(cores=1, free_memory_bytes=8 << 30)
            discovery = serve_config(load_config(), path, model_path="/m", name="m", port=1, host=host).discovery
            for endpoint in (discovery.proxy_nodes, discovery.proxy_workers):
                assert endpoint.startswith(f"ipc://{path}/")
                with socket.socket(socket.AF_UNIX) as bound:
                    bound.bind(endpoint.removeprefix("ipc://"))


def test_no_directory_for_sockets_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(os, "access", lambda place, mode: place != "/tmp")
    with pytest.raises(KvferryError, match=r"set XDG_RUNTIME_DIR or TMPDIR to a writable directory .* at most"):
        run_base()
