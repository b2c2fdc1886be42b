"""Build stand-ins for the CANN libraries that the torch_npu wheel links to, so that it can be imported without them.

    python -m kvferry.ops.npu.build_stub SITE_PACKAGES OUT_FOLDER

Needs gcc and binutils. What the wheel lacks is read from the wheel itself: `host_acl.c` implements the part that
memory, streams and events need; every other missing function gets a body that returns 0, or an error where it would
start a kernel. All of it goes into libascendcl.so; the other libraries are empty and depend on that one.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HOST_ACL = Path(__file__).parent / "stub" / "host_acl.c"
_MAIN_LIBRARY = "libascendcl.so"
_KERNEL_STARTERS = ("aclop", "rtKernel", "aclrtLaunch")
_KERNEL_ERROR = 500000
_SYSTEM_FOLDERS = (
    "/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu", "/lib", "/usr/lib",
)  # fmt: skip


def build(site_packages: Path, out: Path) -> list[Path]:
    """Write the libraries into `out` and return them. Raises CalledProcessError when a tool fails."""
    wheel = [*_shared_objects(site_packages / "torch_npu" / "lib"), *(site_packages / "torch_npu").glob("_C.*.so")]
    ours = [
        *wheel,
        *_shared_objects(site_packages / "torch" / "lib"),
        *_shared_objects(site_packages / "torch_npu.libs"),
    ]
    unmet = {name for path in wheel for name in _needed(path)} - {path.name for path in ours}
    system = {name: path for name in unmet if (path := _system_library(name))}
    defined = _symbols([*ours, *system.values()], defined=True)
    missing = {name for name in _symbols(wheel, defined=False) - defined if not name.startswith(("Py", "_Py"))}

    out.mkdir(parents=True, exist_ok=True)
    rest = out / "missing.c"
    rest.write_text("".join(map(_body, sorted(missing - _implemented()))))
    main = out / _MAIN_LIBRARY
    # -fno-builtin: some missing names are those of C++ operators that gcc knows better; -w: the bodies have no types.
    _run("gcc", "-shared", "-fPIC", "-O1", "-w", "-fno-builtin", f"-Wl,-soname,{main.name}", "-pthread",
         "-o", str(main), str(HOST_ACL), str(rest))  # fmt: skip
    others = sorted(unmet - system.keys() - {_MAIN_LIBRARY})
    for name in others:
        _run("gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(out / name), "-x", "c", "/dev/null",
             f"-L{out}", "-Wl,--no-as-needed", f"-l:{_MAIN_LIBRARY}")  # fmt: skip
    return [main, *(out / name for name in others)]


def _body(symbol: str) -> str:
    if symbol.startswith("_ZT"):  # type information and tables of C++ classes are data
        return f"char {symbol}[256];\n"
    return f"int {symbol}(void) {{ return {_KERNEL_ERROR if symbol.startswith(_KERNEL_STARTERS) else 0}; }}\n"


def _implemented() -> set[str]:
    return set(re.findall(r"^[a-z_ ]+[ *](acl\w+)\(", HOST_ACL.read_text(), re.MULTILINE))


def _shared_objects(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.so*") if path.is_file())


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+?)\]", _run("readelf", "-d", str(library)))


def _system_library(name: str) -> Path | None:
    return next((path for folder in _SYSTEM_FOLDERS if (path := Path(folder, name)).exists()), None)


def _symbols(libraries: Iterable[Path], *, defined: bool) -> set[str]:
    """Dynamic symbols, without versions. Weak undefined ones do not count: the loader does without them."""
    found = set()
    for library in libraries:
        flag = "--defined-only" if defined else "--undefined-only"
        for line in _run("nm", "-D", flag, str(library)).splitlines():
            *_, kind, symbol = line.split()
            if defined or kind == "U":
                found.add(symbol.split("@")[0])
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(arguments: list[str]) -> None:
    """SITE_PACKAGES OUT_FOLDER."""
    site_packages, out = map(Path, arguments)
    sys.stdout.write("".join(f"{path}\n" for path in build(site_packages, out)))


if __name__ == "__main__":
    main(sys.argv[1:])
