"""Memory that control groups, versions 1 and 2, leave to this process: limits of its own group and of all above it.

Reads files below two directories that are given, so that tests give their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Names:
    limit: str
    used: str
    reclaimable: str
    """Of memory.stat: pages of files that nobody used for a while, which the kernel takes back before it refuses."""


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The least that any of the groups still allows; None where none of them has a limit."""
    left = [free for group, names in _groups(root, own) if (free := _free(group, names)) is not None]
    return min(left) if left else None


def _groups(root: Path, own: Path) -> Iterator[tuple[Path, _Names]]:
    for line in _read(own).splitlines() or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from ((group, _V2) for group in _upwards(root, path))
        elif "memory" in controllers.split(","):
            yield from ((group, _V1) for group in _upwards(root / "memory", path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The group and all above it. In a container the path may be the host's; what is not there has no limit to tell."""
    parts = PurePosixPath(path).relative_to("/").parts if path.startswith("/") else ()
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])


def _free(group: Path, names: _Names) -> int | None:
    limit, used = _read(group / names.limit).strip(), _read(group / names.used).strip()
    if not (limit.isdigit() and used.isdigit()):
        return None
    return max(0, int(limit) - int(used) + _stat(_read(group / "memory.stat"), names.reclaimable))


def _stat(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
