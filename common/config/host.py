"""What this host offers: cores and memory, as the process may use them (affinity and container limits count).

Memory that control groups, versions 1 and 2, leave to this process: limits of its own group and of all above it.

Reads files below two directories that are given, so that tests give their own.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about a host."""

    cores: int
    """Physical cores this process may run on, at least 1."""
    free_memory_bytes: int
    """Memory that can be taken without swapping."""


def probe_host() -> HostFacts:
    """Look at this machine now."""
    return HostFacts(cores=_cores(), free_memory_bytes=_free_memory())


def quota_cores(cpu_max: str) -> int | None:
    """Cores that a cgroup's `cpu.max` allows (`quota period`, microseconds), rounded up; None: no limit."""
    quota, _, period = cpu_max.strip().partition(" ")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return max(1, -(-int(quota) // int(period)))


def _cores() -> int:
    logical = psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    # Two hyperthreads of a core share its vector units: threads beyond the cores only get in one another's way.
    cores = max(1, min(physical, allowed))
    return min(cores, quota_cores(_read(_CGROUP / "cpu.max")) or cores)


def _free_memory() -> int:
    free = psutil.virtual_memory().available
    allowed = cgroup_free_bytes()
    return free if allowed is None else min(free, allowed)


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
