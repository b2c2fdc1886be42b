"""Selects the CPU's op table: native if its library is built and returns correct results, else torch's.

KVFERRY_CPU_OPS overrides: `auto` (the default), `native` (an error if unavailable) or `torch`.
"""

import logging
import os
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvferry.common.base.errors import DeviceUnavailableError
from kvferry.common.device.cpu_ops import CpuOps
from kvferry.common.device.native.build import library_path, note_use
from kvferry.common.device.native.library import load_library
from kvferry.common.device.native.ops import NativeOps
from kvferry.common.device.ops import Ops

_LOG = logging.getLogger("kvferry.device")
VARIABLE = "KVFERRY_CPU_OPS"
HOW_TO_BUILD = "`python -m kvferry.common.device.native.build` builds them"
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class NativeProbe:
    """Whether the native ops can be used here."""

    ops: NativeOps | None
    detail: str
    """The library's path, or why it cannot be used; one line that a user can read."""


def probe_native() -> NativeProbe:
    """Load the library built for this CPU and check it on small matrices. Never raises, never builds."""
    path = library_path()
    if not path.exists():
        return NativeProbe(None, f"not built for this CPU; {HOW_TO_BUILD}")
    try:
        ops = NativeOps(load_library(path))
    except (OSError, AttributeError) as error:
        return NativeProbe(None, f"{path} cannot be loaded: {error}")
    if not _is_right(ops):
        return NativeProbe(None, f"{path} returns wrong results; remove it, then {HOW_TO_BUILD}")
    note_use(path)
    return NativeProbe(ops, str(path))


def cpu_ops(choice: str = "") -> Ops:
    """`choice`: auto, native or torch; empty: the value of KVFERRY_CPU_OPS.

    Raises DeviceUnavailableError for any other value, and for native if it cannot be used.
    """
    choice = choice or os.environ.get(VARIABLE, "auto")
    if choice not in ("auto", "native", "torch"):
        raise DeviceUnavailableError(f"{VARIABLE} is {choice!r}; expected auto, native or torch")
    if choice == "torch":
        return CpuOps()
    probe = probe_native()
    if probe.ops is not None:
        return probe.ops
    if choice == "native":
        raise DeviceUnavailableError(f"native ops: {probe.detail}")
    _LOG.warning("native ops: %s; using torch's ops, which are slower", probe.detail)
    return CpuOps()


def _is_right(ops: NativeOps) -> bool:
    """Compare linears of both dtypes, at sizes with remainders, with torch: finds a miscompiled library, not bugs."""
    for dtype, tolerance in _TOLERANCE.items():
        weight = torch.linspace(-1.0, 1.0, 37 * 45).sin().view(37, 45).to(dtype)
        x = torch.linspace(1.0, -0.5, 7 * 45).cos().view(7, 45).to(dtype)
        wanted = functional.linear(x.float(), weight.float())
        if not torch.allclose(ops.pack_linear(weight)(x).float(), wanted, rtol=tolerance, atol=tolerance):
            return False
    return True
