"""Both op sets of the CPU by name, so that the same tests run on each."""

import pytest

from kvferry.common.device.base import Ops
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.native.build import build, find_compiler
from kvferry.common.device.native.select import cpu_ops

OP_SETS = ("torch", "native")


def ops_named(name: str) -> Ops:
    """Builds the native library if it is not there; skips only where there is no compiler."""
    if name == "native":
        if find_compiler() is None:
            pytest.skip("no C++ compiler")
        build()
    return cpu_ops(name)


def cpu_with(name: str, threads: int = 1) -> CpuDevice:
    """A CPU device with these ops."""
    return CpuDevice(threads, ops_named(name))
