"""A cluster that cannot start says why on one clear last line, ends with the right code, and leaves nothing."""

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Reference
from tests.support.serve import Served, ServeOptions

pytestmark = pytest.mark.e2e


def fails(options: ServeOptions, code: int) -> str:
    """Start it; it must end with the code. Returns the last line that it wrote."""
    served = Served(options)
    try:
        served.ended(code)
        assert "Traceback" not in served.log()
        return served.log().splitlines()[-1]
    finally:
        served.close()


@pytest.fixture
def broken(reference: Reference, tmp_path: Path) -> Path:
    """A copy of the model to be damaged."""
    return Path(shutil.copytree(reference.path, tmp_path / "broken"))


def test_no_model_there(tmp_path: Path) -> None:
    line = fails(ServeOptions(tmp_path / "nothing"), 2)
    assert line == f"kvferry serve: error: model.path: {tmp_path / 'nothing'} does not exist"


def test_damaged_weights(broken: Path) -> None:
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    line = fails(ServeOptions(broken), 2)
    assert line.startswith(f"kvferry serve: error: {weights} cannot be read: "), "nothing was started for it"


def test_port_in_use(reference: Reference) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        # The option comes first, the setting wins.
        line = fails(ServeOptions(reference.path, settings={"router.port": port}), 1)
    assert line == (
        f"kvferry serve: error: port {port} on 127.0.0.1 is in use; choose another with --port, or 0 for a free one"
    )


def test_unknown_setting(reference: Reference) -> None:
    line = fails(ServeOptions(reference.path, settings={"node.blok_size": 16}), 2)
    assert line.startswith("kvferry serve: error: ")
    assert "node.block_size" in line


def test_too_little_memory_for_the_model(reference: Reference) -> None:
    line = fails(ServeOptions(reference.path, settings={"node.model_memory_bytes": 1000}), 2)
    assert "node.model_memory_bytes: this node needs " in line
    assert "may take 1 MiB" in line


def test_too_little_memory_for_one_request(reference: Reference) -> None:
    """Both nodes say it, each in its own name; it is shown once."""
    served = Served(ServeOptions(reference.path, settings={"node.kv_cache_bytes": 4096}))
    try:
        served.ended(2)
        *before, line = served.log().splitlines()
    finally:
        served.close()
    assert re.match(r"kvferry serve: error: (prefill|decode)-0 could not start: node\.kv_cache_bytes: 4096 bytes", line)
    assert not any("kv_cache_bytes" in earlier for earlier in before), before


def test_a_node_that_cannot_announce_itself_says_so(reference: Reference, tmp_path: Path) -> None:
    """Its control thread runs already and has sockets open; that must not be what is reported."""
    file = tmp_path / "cluster.toml"
    file.write_text(
        f"""
        [model]
        path = "{reference.path}"
        [node]
        max_model_len = 256
        kv_cache_bytes = 8388608
        [discovery]
        announce_to = ["tcp://*:1035"]
        """
    )
    command = (sys.executable, "-m", "kvferry.ops.cli.main", "prefill", "--config", str(file))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
    assert ended.returncode == 2, ended.stderr
    reason = "it is a wildcard; give the host and the port of the peer"
    line = f"kvferry prefill: error: cannot connect to tcp://*:1035: {reason}"
    assert ended.stderr.splitlines()[-1] == line
