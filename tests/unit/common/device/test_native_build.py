"""Building and selecting the native ops: a missing part is reported, and torch's ops are used instead."""

import logging
import os
from pathlib import Path

import pytest

from kvferry.common.base.errors import DeviceUnavailableError
from kvferry.common.device.cpu_ops import CpuOps
from kvferry.common.device.native import build as building
from kvferry.common.device.native.ops import NativeOps
from kvferry.common.device.native.select import VARIABLE, cpu_ops, probe_native
from tests.support.cpu_ops import ops_named


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def a_library(cache: Path, content: bytes) -> Path:
    path = building.library_path()
    assert path.is_relative_to(cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def test_the_path_depends_on_sources_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = building.library_path()
    assert here == building.library_path()
    monkeypatch.setattr(building, "_cpu", lambda: "flags : another")
    assert building.library_path() != here


def test_torch_ops_are_used_if_the_library_is_not_built(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvferry.device"):
        assert type(cpu_ops()) is CpuOps
    assert "not built" in caplog.text
    assert "slower" in caplog.text
    with pytest.raises(DeviceUnavailableError, match="not built"):
        cpu_ops("native")


def test_torch_ops_are_used_if_the_library_is_damaged(empty_cache: Path) -> None:
    a_library(empty_cache, b"no library at all")
    probe = probe_native()
    assert probe.ops is None
    assert "cannot be loaded" in probe.detail
    assert type(cpu_ops()) is CpuOps


def test_the_environment_variable_selects_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    ops_named("native")
    monkeypatch.setenv(VARIABLE, "native")
    assert isinstance(cpu_ops(), NativeOps)
    monkeypatch.setenv(VARIABLE, "torch")
    assert type(cpu_ops()) is CpuOps
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(DeviceUnavailableError, match="fast"):
        cpu_ops()


def test_a_missing_compiler_is_reported(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(building.BuildError, match="compiler"):
        building.build()
    assert building.main() == 0
    assert "slower" in capsys.readouterr().err


def test_a_failing_compiler_leaves_no_files(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(building.BuildError, match="failed"):
        building.build()
    assert [path for path in empty_cache.rglob("*") if path.is_file()] == []


def test_an_existing_library_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ops_named("native")
    monkeypatch.setenv("CXX", "false")
    assert building.build() == building.library_path()


def a_quick_compiler(directory: Path) -> str:
    """A compiler that writes an empty output file."""
    compiler = directory / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o700)
    return str(compiler)


def test_only_the_most_recently_used_libraries_are_kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", a_quick_compiler(empty_cache))
    others = [empty_cache / "native" / f"other-{i}" / "libkvferry.so" for i in range(building.KEPT_LIBRARIES + 1)]
    for i, library in enumerate(others):
        library.parent.mkdir(parents=True)
        library.touch()
        os.utime(library.parent, (i, i))
    building.note_use(others[0])
    ours = building.build()
    assert ours.exists()
    assert [library.exists() for library in others] == [True, False, False, *[True] * (len(others) - 3)]


def test_loading_or_finding_a_library_marks_it_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ops_named("native")
    place = building.library_path().parent
    for use in (cpu_ops, building.build):
        os.utime(place, (0, 0))
        use()
        assert place.stat().st_mtime > 0
