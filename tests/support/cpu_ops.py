"""Both op tables of the CPU by name, so that the same tests run on each."""

import pytest

from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.native.build import build, find_compiler
from kvferry.common.device.native.select import cpu_ops
from kvferry.common.device.ops import Ops

OP_SETS = ("torch", "native")


def ops_named(name: str) -> Ops:
    """Build the native library if it is missing; skip the test only if there is no compiler."""
    if name == "native":
        if find_compiler() is None:
            pytest.skip("no C++ compiler")
        build()
    return cpu_ops(name)


def cpu_with(name: str, threads: int = 1) -> CpuDevice:
    return CpuDevice(threads, ops_named(name))
