"""Builds the C++ kernels for this machine, once. `python -m kvferry.common.device.native.build` prints their path.

The library has a plain C interface and depends on neither Python nor torch: the build needs only a C++ compiler, takes
seconds, and survives upgrades of both. Its path in the user's cache is a hash of the sources, the flags and the CPU, so
a library for another CPU is never loaded. Loading (`library.py`) never builds.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvferry.common.base.errors import KvferryError
from kvferry.common.base.user_cache import cache_dir

_SOURCES = Path(__file__).parent / "src"
# No -ffast-math: the compiler must not reorder sums, since a row's result must not depend on its neighbours.
_FLAGS = ("-std=gnu++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
          "-fPIC", "-fvisibility=hidden", "-pthread")  # fmt: skip
_COMPILERS = ("g++", "clang++", "c++")
_JOBS = 2
KEPT_LIBRARIES = 8
"""The most recently used libraries; older ones are removed after a build. Several checkouts may share a cache."""
_CPU_LINES = ("flags", "features", "model name", "cpu part")


class BuildError(KvferryError):
    """The compiler is missing or failed."""


def find_compiler() -> str | None:
    """$CXX, else the first known C++ compiler on the path."""
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        if name and shutil.which(shlex.split(name)[0]):
            return name
    return None


def library_path() -> Path:
    """The library's path for these sources and this CPU, whether or not it is built."""
    digest = hashlib.sha256("\n".join((*_FLAGS, platform.system(), platform.machine(), _cpu())).encode())
    for source in _files("*"):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return cache_dir() / "native" / digest.hexdigest()[:24] / "libkvferry.so"


def build(*, force: bool = False) -> Path:
    """Build the library if it is missing or `force` is given; return its path. Raises BuildError."""
    target = library_path()
    if target.exists() and not force:
        note_use(target)
        return target
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(_COMPILERS)} or $CXX)")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as work:
            _compile(shlex.split(compiler), Path(work)).replace(target)
        _remove_oldest(target.parent.parent)
    except OSError as error:
        raise BuildError(f"{target.parent}: {error.strerror}") from None
    return target


def note_use(library: Path) -> None:
    """Mark `library` as recently used, for the removal of old ones."""
    with contextlib.suppress(OSError):  # a cache of another user, or not writable
        os.utime(library.parent)


def _remove_oldest(directory: Path) -> None:
    # A process that has loaded a removed library keeps it until it ends.
    places = sorted(directory.iterdir(), key=lambda place: place.stat().st_mtime, reverse=True)
    for place in places[KEPT_LIBRARIES:]:
        shutil.rmtree(place, ignore_errors=True)


def _compile(compiler: Sequence[str], work: Path) -> Path:
    def one(source: Path) -> Path:
        made = work / f"{source.stem}.o"
        _run([*compiler, *_FLAGS, "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", _JOBS))) as pool:
        objects = list(pool.map(one, _files("*.cpp")))
    library = work / "libkvferry.so"
    _run([*compiler, *_FLAGS, "-shared", *map(str, objects), "-o", str(library)])
    return library


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-20:])
        raise BuildError(f"{shlex.join(command)} failed:\n{last}")


def _files(pattern: str) -> list[Path]:
    return sorted(path for path in _SOURCES.glob(pattern) if path.suffix in (".cpp", ".h"))


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The first core's lines that determine which instructions the compiler may use."""
    try:
        lines = cpuinfo.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.split(":")[0].strip().lower() in _CPU_LINES)


def main() -> int:
    """Build if needed. A missing compiler is reported and is not a failure: torch's ops work without the library."""
    target = library_path()
    if not target.exists():
        sys.stderr.write("building the native ops for this CPU (once, takes seconds)\n")
    try:
        target = build()
    except BuildError as error:
        sys.stderr.write(f"native ops were not built; torch's ops are used, which are slower: {error}\n")
        return 0
    sys.stdout.write(f"{target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
