"""The checks of `kvferry doctor`, one function for each subject. A check must not raise for a missing thing."""

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvferry.common.base.user_cache import cache_dir
from kvferry.common.config.host import probe_host
from kvferry.common.config.load import load_config
from kvferry.common.config.resolve import default_kv_cache_bytes, nodes_on_host
from kvferry.ops import model_store

_MIB = 1 << 20
_ENOUGH_MEMORY_BYTES = 4 << 30
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: what was found, or what is missing and what that costs."""

    what: str
    ok: bool
    detail: str


def examine() -> tuple[Finding, ...]:
    """Run all checks."""
    found = [
        python(),
        *devices(),
        cpu_features(),
        compiler(),
        native_ops(),
        cores(),
        memory(),
        zeromq(),
        *ports(),
        cache(),
        model_cache(),
    ]
    return tuple(found)


def python() -> Finding:
    """The interpreter's version, and torch's."""
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        return Finding("python", False, f"{platform.python_version()}, no torch: a router can run here, nodes cannot")
    ok = sys.version_info >= (3, 11)
    return Finding(
        "python", ok, f"{platform.python_version()}, {torch}" + ("" if ok else "; 3.11 or later is required")
    )


def devices(files: Path = Path("/dev")) -> Iterator[Finding]:
    """The devices that nodes can compute on. The CPU is enough: an unusable accelerator is a warning only if its device
    files exist."""
    try:
        from kvferry.common.device.select import known_devices, load_backend
    except ImportError as error:
        yield Finding("devices", False, f"cannot be checked: {error}")
        return
    for backend in map(load_backend, known_devices()):
        probe = backend.probe()
        is_here = any(any(files.glob(pattern)) for pattern in backend.device_files)
        if probe.available or is_here:
            yield Finding(f"device {probe.name}", probe.available, probe.detail)
        else:
            # Advice on drivers would not help a user without such a device.
            expected = " or ".join(str(files / pattern) for pattern in backend.device_files)
            yield Finding(f"device {probe.name}", True, f"none in this machine: no {expected}")


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    """The CPU's instruction sets that matter for matmuls."""
    try:
        words = set(cpuinfo.read_text(errors="replace").split())
    except OSError:
        return Finding("cpu features", True, f"{platform.machine()}; not listed by this system")
    present = [flag for flag in _CPU_FLAGS if flag in words]
    fast = any("bf16" in flag for flag in present)
    advice = "" if fast else "; no bfloat16 instructions: bfloat16 saves memory and speeds up decode, but not prefill"
    return Finding("cpu features", bool(present), (", ".join(present) or "none that matter") + advice)


def compiler() -> Finding:
    """A C++ compiler for the native ops."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return Finding("compiler", True, path)
    return Finding(
        "compiler", False, "no g++ or clang++: native ops cannot be built; torch's ops are used, which are slower"
    )


def native_ops() -> Finding:
    """The native ops built for this CPU."""
    try:
        from kvferry.common.device.native.select import probe_native
    except ImportError as error:
        return Finding("native ops", False, f"cannot be checked: {error}")
    probe = probe_native()
    return Finding(
        "native ops",
        probe.ops is not None,
        probe.detail + ("" if probe.ops else "; torch's ops are used, which are slower"),
    )


def cores() -> Finding:
    """Cores of this machine, and of a node by default."""
    host = probe_host()
    nodes = nodes_on_host(load_config())
    share = max(1, host.cores // nodes)
    ok = host.cores >= nodes
    advice = "" if ok else f"; {nodes} nodes share {host.cores} core"
    return Finding("cores", ok, f"{host.cores}; {share} a node by default{advice}")


def memory() -> Finding:
    """Free memory of this machine, and the default size of a node's KV cache."""
    free = probe_host().free_memory_bytes
    cache = default_kv_cache_bytes(free, nodes_on_host(load_config()))
    ok = free >= _ENOUGH_MEMORY_BYTES
    advice = "" if ok else "; two nodes of the small model need about 3 GiB"
    return Finding("memory", ok, f"{free // _MIB} MiB free; KV cache {cache // _MIB} MiB a node by default{advice}")


def zeromq() -> Finding:
    """libzmq's version, and whether it supports CURVE."""
    try:
        from kvferry.common.transport.options import zmq_features
    except ImportError as error:
        return Finding("zeromq", False, f"cannot be checked: {error}")
    return Finding("zeromq", *zmq_features())


def ports() -> Iterator[Finding]:
    """Whether the default ports are free."""
    config = load_config()
    nodes, workers = (_port_of(place) for place in (config.discovery.proxy_nodes, config.discovery.proxy_workers))
    yield port("HTTP", config.router.port, "choose another with router.port, or a free one with kvferry serve --port 0")
    yield port("announcements (kvferry router; serve needs none)", nodes, "choose another with discovery.proxy_nodes")
    yield port("members (kvferry router; serve needs none)", workers, "choose another with discovery.proxy_workers")


def port(use: str, number: int, hint: str) -> Finding:
    """Whether a port is free; `hint` is added if it is in use."""
    free = is_free(number)
    return Finding(f"port {number}", free, f"{use}: free" if free else f"{use}: in use, perhaps by a cluster; {hint}")


def _port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def cache() -> Finding:
    """Whether the cache directory is writable. Makes and removes a directory: on some file systems permissions do not
    show it."""
    place = cache_dir().absolute()
    try:
        there = next(parent for parent in (place, *place.parents) if parent.exists())
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=there):
            return Finding("cache", True, f"{place} is writable")
    except OSError as error:
        lost = "the small model cannot be fetched, and native ops and packed weights cannot be cached"
        return Finding(
            "cache", False, f"{place} is not writable: {error.strerror}; {lost}; choose another with KVFERRY_CACHE"
        )


def model_cache() -> Finding:
    """Whether the small real model is cached and intact."""
    path = model_store.model_path()
    if model_store.has_model():
        intact = model_store.is_intact()
        return Finding("small model", intact, str(path) if intact else f"{path} is damaged; remove it")
    return Finding("small model", False, f"not in {path.parent} yet; `kvferry serve` fetches it (94 MiB)")


def is_free(port: int) -> bool:
    """Whether a server could listen on a loopback port now."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
