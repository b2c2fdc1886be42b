"""The memory that control groups leave to a process, read from files in the kernel's format."""

from pathlib import Path

import pytest

from kvferry.common.config.host import cgroup_free_bytes


def write(root: Path, group: str, **files: str) -> None:
    directory = root / group
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """/proc/self/cgroup for version 2, in the root group."""
    path = tmp_path / "own"
    path.write_text("0::/\n")
    return path


def test_no_limit_anywhere(tmp_path: Path, own: Path) -> None:
    assert cgroup_free_bytes(tmp_path, own) is None
    write(tmp_path, ".", memory__max="max", memory__current="5")
    assert cgroup_free_bytes(tmp_path, own) is None
    assert cgroup_free_bytes(tmp_path, tmp_path / "absent") is None


def test_inactive_file_pages_count_as_free(tmp_path: Path, own: Path) -> None:
    write(tmp_path, ".", memory__max="1000", memory__current="900", memory__stat="anon 500\ninactive_file 300")
    assert cgroup_free_bytes(tmp_path, own) == 400


def test_the_tightest_limit_of_all_parent_groups_applies(tmp_path: Path, own: Path) -> None:
    own.write_text("0::/a/b\n")
    write(tmp_path, ".", memory__max="5000", memory__current="0")
    write(tmp_path, "a", memory__max="1000", memory__current="1200")
    write(tmp_path, "a/b", memory__max="max", memory__current="10")
    assert cgroup_free_bytes(tmp_path, own) == 0


def test_version_1(tmp_path: Path, own: Path) -> None:
    own.write_text("9:name=systemd:/\n4:cpu,memory:/x/y\n0::/\n")
    limits = {"memory__limit_in_bytes": "700", "memory__usage_in_bytes": "600"}
    write(tmp_path, "memory/x", **limits, memory__stat="inactive_file 1\ntotal_inactive_file 50")
    assert cgroup_free_bytes(tmp_path, own) == 150
