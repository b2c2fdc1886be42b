"""Which ops the CPU computes by: the native ones where their library is built and gives right results, else torch's.

KVFERRY_CPU_OPS chooses: `auto` (the default), `native` (missing is an error) or `torch`.
"""

import logging
import os
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvferry.common.base.errors import DeviceUnavailableError
from kvferry.common.device.base import Ops
from kvferry.common.device.cpu_ops import CpuOps
from kvferry.common.device.native.build import library_path, note_use
from kvferry.common.device.native.library import load_library
from kvferry.common.device.native.ops import NativeOps

_LOG = logging.getLogger("kvferry.device")
VARIABLE = "KVFERRY_CPU_OPS"
HOW_TO_BUILD = "`python -m kvferry.common.device.native.build` builds them"
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class NativeProbe:
    """Whether the native ops can be used here, and why not; one line, fit for a user."""

    ops: NativeOps | None
    detail: str


def probe_native() -> NativeProbe:
    """Load the library if it was built for this CPU and try it on small matrices. Never raises, never builds."""
    path = library_path()
    if not path.exists():
        return NativeProbe(None, f"not built for this CPU; {HOW_TO_BUILD}")
    try:
        ops = NativeOps(load_library(path))
    except (OSError, AttributeError) as error:
        return NativeProbe(None, f"{path} cannot be loaded: {error}")
    if not _is_right(ops):
        return NativeProbe(None, f"{path} gives wrong results; remove it, then {HOW_TO_BUILD}")
    note_use(path)
    return NativeProbe(ops, str(path))


def cpu_ops(choice: str = "") -> Ops:
    """`choice`: auto, native or torch; empty: what KVFERRY_CPU_OPS says.

    Raises DeviceUnavailableError when it is none of these, or native and not there.
    """
    choice = choice or os.environ.get(VARIABLE, "auto")
    if choice not in ("auto", "native", "torch"):
        raise DeviceUnavailableError(f"{VARIABLE} is {choice!r}; it may be auto, native or torch")
    if choice == "torch":
        return CpuOps()
    probe = probe_native()
    if probe.ops is not None:
        return probe.ops
    if choice == "native":
        raise DeviceUnavailableError(f"native ops: {probe.detail}")
    _LOG.warning("native ops: %s; torch's are used, which are slower", probe.detail)
    return CpuOps()


def _is_right(ops: NativeOps) -> bool:
    """Linears of both dtypes, of sizes that leave tails, against torch. What the tests find is not repeated here."""
    for dtype, tolerance in _TOLERANCE.items():
        weight = torch.linspace(-1.0, 1.0, 37 * 45).sin().view(37, 45).to(dtype)
        x = torch.linspace(1.0, -0.5, 7 * 45).cos().view(7, 45).to(dtype)
        wanted = functional.linear(x.float(), weight.float())
        if not torch.allclose(ops.pack_linear(weight)(x).float(), wanted, rtol=tolerance, atol=tolerance):
            return False
    return True
