"""`python -m MODULE --help` prints usage only, and needs none of the packages that only tests or nodes have."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
MODULES = ("kvferry.ops.npu.check", "kvferry.ops.bench.keys", "tests.chaos", "tests.chaos.soak", "tests.chaos.storm")
RUN_WITHOUT = """
import runpy, sys
for name in ("torch", "transformers", "pytest", "hypothesis"):
    sys.modules[name] = None
sys.argv = [sys.argv[1], "--help"]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("module", MODULES)
def test_help_imports_no_heavy_packages(module: str) -> None:
    command = (sys.executable, "-c", RUN_WITHOUT, module)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m {module} ")
