"""The cores and the memory of this host that this process may use, considering CPU affinity and container limits.

Reads /proc and the control groups (versions 1 and 2): the limits of the process' own group and of all its parents.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The resources of a host that this process may use."""

    cores: int
    """Physical cores, at least 1."""
    free_memory_bytes: int
    """Memory that can be allocated without swapping."""


def probe_host() -> HostFacts:
    """Measure this host now."""
    return HostFacts(cores=_cores(), free_memory_bytes=_free_memory())


def quota_cores(cpu_max: str) -> int | None:
    """Cores permitted by a cgroup's `cpu.max` (`quota period`, microseconds), rounded up. None: no limit."""
    quota, _, period = cpu_max.strip().partition(" ")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return max(1, -(-int(quota) // int(period)))


def _cores() -> int:
    logical = psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    # Two hyperthreads of a core share its vector units, so more threads than physical cores slow each other down.
    cores = max(1, min(physical, allowed))
    return min(cores, quota_cores(_read(_CGROUP / "cpu.max")) or cores)


def _free_memory() -> int:
    free = psutil.virtual_memory().available
    allowed = cgroup_free_bytes()
    return free if allowed is None else min(free, allowed)


@dataclass(frozen=True, slots=True)
class _FileNames:
    limit: str
    used: str
    reclaimable: str
    """A line of memory.stat: inactive file pages, which the kernel reclaims before it refuses an allocation."""


_V1 = _FileNames("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _FileNames("memory.max", "memory.current", "inactive_file")


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The least free memory of the process' own group and its parents; None when none has a limit."""
    left = [free for group, names in _groups(root, own) if (free := _free(group, names)) is not None]
    return min(left) if left else None


def _groups(root: Path, own: Path) -> Iterator[tuple[Path, _FileNames]]:
    for line in _read(own).splitlines() or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from ((group, _V2) for group in _upwards(root, path))
        elif "memory" in controllers.split(","):
            yield from ((group, _V1) for group in _upwards(root / "memory", path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The group and its parents. In a container the path may be the host's: a missing directory has no limit."""
    parts = PurePosixPath(path).relative_to("/").parts if path.startswith("/") else ()
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])


def _free(group: Path, names: _FileNames) -> int | None:
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
