"""What this host offers: cores and memory, as the process may use them (affinity and container limits count)."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvferry.common.config.cgroup import cgroup_free_bytes

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


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
