"""Building and choosing the native ops: what is missing is said, and then torch's ops are used."""

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


def test_the_place_depends_on_sources_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = building.library_path()
    assert here == building.library_path()
    monkeypatch.setattr(building, "_cpu", lambda: "flags : another")
    assert building.library_path() != here


def test_not_built_means_torch(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvferry.device"):
        assert type(cpu_ops()) is CpuOps
    assert "not built" in caplog.text
    assert "slower" in caplog.text
    with pytest.raises(DeviceUnavailableError, match="not built"):
        cpu_ops("native")


def test_a_damaged_library_means_torch(empty_cache: Path) -> None:
    a_library(empty_cache, b"no library at all")
    probe = probe_native()
    assert probe.ops is None
    assert "cannot be loaded" in probe.detail
    assert type(cpu_ops()) is CpuOps


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    ops_named("native")
    monkeypatch.setenv(VARIABLE, "native")
    assert isinstance(cpu_ops(), NativeOps)
    monkeypatch.setenv(VARIABLE, "torch")
    assert type(cpu_ops()) is CpuOps
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(DeviceUnavailableError, match="fast"):
        cpu_ops()


def test_without_a_compiler_it_says_so(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(building.BuildError, match="compiler"):
        building.build()
    assert building.main() == 0
    assert "slower" in capsys.readouterr().err


def test_a_compiler_that_fails_leaves_nothing_behind(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(building.BuildError, match="failed"):
        building.build()
    assert [path for path in empty_cache.rglob("*") if path.is_file()] == []


def test_what_is_built_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ops_named("native")
    monkeypatch.setenv("CXX", "false")
    assert building.build() == building.library_path()


def a_quick_compiler(directory: Path) -> str:
    """Makes an empty file of what it is asked for."""
    compiler = directory / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o700)
    return str(compiler)


def test_only_the_libraries_used_last_stay(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_one_that_is_loaded_or_found_again_counts_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ops_named("native")
    place = building.library_path().parent
    for use in (cpu_ops, building.build):
        os.utime(place, (0, 0))
        use()
        assert place.stat().st_mtime > 0
