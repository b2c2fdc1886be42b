"""`kvferry doctor`: every check reports something, and a missing thing is not a failure."""

import json
import socket
from pathlib import Path

import pytest

from kvferry.common.device.select import probe_devices
from kvferry.ops.cli import findings
from kvferry.ops.cli.main import main


def test_every_subject_is_reported(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    subjects = {finding["what"] for finding in found}
    assert {
        "python",
        "device cpu",
        "compiler",
        "cores",
        "memory",
        "zeromq",
        "port 1025",
        "cache",
        "small model",
    } <= subjects
    assert all(finding["detail"] for finding in found)


def test_text_output_has_one_line_per_subject(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8
    assert all(line.startswith(("ok   ", "warn ")) for line in lines)


@pytest.mark.skipif(any(probe.available for probe in probe_devices()[:2]), reason="an accelerator is here")
def test_an_accelerator_is_a_warning_only_if_its_device_files_exist(tmp_path: Path):
    absent = {finding.what: finding for finding in findings.devices(tmp_path)}
    assert all(finding.ok for finding in absent.values())
    assert absent["device npu"].detail == f"none in this machine: no {tmp_path}/davinci[0-9]*"
    assert "pip install" not in absent["device npu"].detail
    assert absent["device cuda"].detail.startswith("none in this machine: no ")
    (tmp_path / "davinci0").touch()
    (tmp_path / "nvidia0").touch()
    here = {finding.what: finding.ok for finding in findings.devices(tmp_path)}
    assert here == {"device npu": False, "device cuda": False, "device cpu": True}


def test_ports_name_the_command_that_needs_them():
    uses = [finding.detail for finding in findings.ports()]
    assert [("serve needs none" in use) for use in uses] == [False, True, True]


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    finding = findings.compiler()
    assert not finding.ok
    assert "slower" in finding.detail


def test_cpu_features_are_read(tmp_path: Path):
    (tmp_path / "old").write_text("flags : fpu avx2 sse\n")
    (tmp_path / "new").write_text("flags : fpu avx2 avx512f avx512_bf16\n")
    assert "no bfloat16 instructions" in findings.cpu_features(tmp_path / "old").detail
    assert findings.cpu_features(tmp_path / "new").detail == "avx2, avx512f, avx512_bf16"
    assert findings.cpu_features(tmp_path / "none").ok


@pytest.mark.parametrize("cache", ["/proc/x", "/proc/x/y", "{file}/x", "{file}"])
def test_a_cache_that_is_not_writable_is_reported(tmp_path: Path, monkeypatch, cache: str):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("KVFERRY_CACHE", cache.format(file=file))
    finding = findings.cache()
    assert not finding.ok
    assert "is not writable: " in finding.detail
    assert "KVFERRY_CACHE" in finding.detail


def test_the_check_of_the_cache_leaves_no_files(tmp_path: Path, monkeypatch):
    for place in (tmp_path, tmp_path / "not" / "yet"):
        monkeypatch.setenv("KVFERRY_CACHE", str(place))
        assert findings.cache() == findings.Finding("cache", True, f"{place} is writable")
        assert list(tmp_path.iterdir()) == []


def test_a_missing_model_is_reported(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    finding = findings.model_cache()
    assert not finding.ok
    assert "kvferry serve" in finding.detail


def test_a_port_in_use_is_detected(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not findings.is_free(taken.getsockname()[1])
    assert findings.is_free(0)


def test_native_ops_that_are_not_built_are_reported(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    finding = findings.native_ops()
    assert not finding.ok
    assert "kvferry.common.device.native.build" in finding.detail
