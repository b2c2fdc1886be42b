"""Run `tests/npu` in an environment of its own, on a machine that needs neither an NPU nor CANN.

    python -m kvferry.ops.npu.check [pytest arguments]

Makes `.venv-npu` when it is not there: torch, the real torch_npu wheel (without the packages it would pull in), pytest.
It stays apart from the project's own environment because torch_npu pins torch exactly and needs CANN to be imported.
Then builds the stand-ins for CANN (`build_stub.py`) and runs pytest over them. Extra pip arguments: PIP_ARGS.
Exit code: pytest's.
"""

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

from kvferry.ops.npu.build_stub import HOST_ACL, build

TORCH = "torch==2.13.0"
TORCH_NPU = "torch-npu==2.13.0"
OTHERS = ("numpy", "pyyaml", "msgspec", "orjson", "psutil", "pytest", "pytest-asyncio", "pytest-timeout")
_ROOT = Path(__file__).resolve().parents[2]
_VENV = _ROOT / ".venv-npu"
_STUB = _VENV / "cann-stub"
_STAMP = ".kvferry-made-from"


def prepare() -> Path:
    """The environment's Python, made ready; quick when nothing has changed."""
    python = _VENV / "bin" / "python"
    if not _is_current(_VENV, _packages()):
        _run(sys.executable, "-m", "venv", str(_VENV))
        pip = (str(python), "-m", "pip", "install", "--quiet", *shlex.split(os.environ.get("PIP_ARGS", "")))
        _run(*pip, TORCH)
        _run(*pip, "--no-deps", TORCH_NPU)
        _run(*pip, *OTHERS)
        _mark_current(_VENV, _packages())
    if not _is_current(_STUB, _packages() + _sources()):
        build(_site_packages(python), _STUB)
        _mark_current(_STUB, _packages() + _sources())
    return python


def run_tests(python: Path, arguments: list[str]) -> int:
    """pytest's exit code. Only `tests/npu/conftest.py` is loaded: the others need what this environment lacks."""
    environment = os.environ | {
        "KVFERRY_CANN_STUB": str(_STUB),
        "LD_LIBRARY_PATH": str(_STUB),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TASK_QUEUE_ENABLE": "0",  # an op that fails says so at its own call, not some calls later
        "HOST_ACL_DEVICES": "2",
        "PYTHONPATH": str(_ROOT / "src"),
    }
    command = [str(python), "-m", "pytest", "tests/npu", "--confcutdir=tests/npu", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=_ROOT, env=environment, check=False).returncode


def _packages() -> str:
    return "\n".join((TORCH, TORCH_NPU, *OTHERS, sys.version))


def _sources() -> str:
    """What the stand-ins are made from, as a digest."""
    builder = Path(__file__).with_name("build_stub.py")
    return hashlib.sha256(HOST_ACL.read_bytes() + builder.read_bytes()).hexdigest()


def _is_current(folder: Path, wanted: str) -> bool:
    stamp = folder / _STAMP
    return stamp.exists() and stamp.read_text() == wanted


def _mark_current(folder: Path, made: str) -> None:
    (folder / _STAMP).write_text(made)


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('platlib'))"
    return Path(subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def _run(*command: str) -> None:
    subprocess.run(command, cwd=_ROOT, check=True)


def main(argv: list[str]) -> int:
    """See the module's docstring; what it does not know itself is pytest's."""
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.ops.npu.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _, arguments = parser.parse_known_args(argv)
    return run_tests(prepare(), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
