"""Builds the C++ kernels for this machine, once.

`python -m kvferry.common.device.native.build` prints the library's path.

The library has a plain C interface and sees neither Python nor torch, so it needs a C++ compiler and nothing else,
takes seconds, and outlives upgrades of both. Its place in the user's cache is named by the sources, the flags and the
CPU: a library for another CPU is never loaded. Loading (`library.py`) never builds.
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
# No -ffast-math: the compiler must not reorder sums, since a row's result may not depend on its neighbours.
_FLAGS = ("-std=gnu++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
          "-fPIC", "-fvisibility=hidden", "-pthread")  # fmt: skip
_COMPILERS = ("g++", "clang++", "c++")
_JOBS = 2
KEPT_LIBRARIES = 8
"""Those that were used last; others are removed when a new one is built. Several checkouts may share a cache."""
_CPU_LINES = ("flags", "features", "model name", "cpu part")


class BuildError(KvferryError):
    """The compiler is missing or said no."""


def find_compiler() -> str | None:
    """$CXX or the first C++ compiler on the path."""
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        if name and shutil.which(shlex.split(name)[0]):
            return name
    return None


def library_path() -> Path:
    """Where the library for these sources and this CPU lies or will lie."""
    digest = hashlib.sha256("\n".join((*_FLAGS, platform.system(), platform.machine(), _cpu())).encode())
    for source in _files("*"):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return cache_dir() / "native" / digest.hexdigest()[:24] / "libkvferry.so"


def build(*, force: bool = False) -> Path:
    """The library's path, after building it if it is not there or `force` is given. Raises BuildError."""
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
    """Count `library` among those that were used last."""
    with contextlib.suppress(OSError):  # another user's cache, or one that cannot be written
        os.utime(library.parent)


def _remove_oldest(directory: Path) -> None:
    """Processes that have one of these loaded keep it until they end."""
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
    """What names the instructions that the compiler may use: the first core's lines."""
    try:
        lines = cpuinfo.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.split(":")[0].strip().lower() in _CPU_LINES)


def main() -> int:
    """Build if needed; a machine without a compiler is told so, and is no failure."""
    target = library_path()
    if not target.exists():
        sys.stderr.write("building the native ops for this CPU (once, some seconds)\n")
    try:
        target = build()
    except BuildError as error:
        sys.stderr.write(f"native ops were not built, torch's are used, which are slower: {error}\n")
        return 0
    sys.stdout.write(f"{target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
