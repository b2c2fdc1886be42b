"""From the configuration's device name to a device. Imports a backend only when it is asked for.

Order of `auto`: npu, cuda, cpu. One that is there but cannot be opened is passed over with a warning; the CPU is always
there, so `auto` does not raise.
"""

import logging
from typing import Literal

from kvferry.common.base.errors import DeviceUnavailableError
from kvferry.common.device.base import Device, DeviceProbe

_LOG = logging.getLogger("kvferry.device")

DeviceName = Literal["auto", "cpu", "cuda", "npu"]


def probe_devices() -> tuple[DeviceProbe, ...]:
    """What this machine has, in the order of preference. Never raises."""
    return _probe_npu(), _probe_cuda(), _probe_cpu()


def select_device(name: DeviceName, threads: int, index: int = 0) -> Device:
    """Open a device, binding the calling thread to it. `threads`: for work on the CPU; `index`: which accelerator.

    Raises DeviceUnavailableError, saying what is missing, when a device was named and cannot be used.
    """
    if name == "npu":
        from kvferry.common.device.npu import open_npu

        return open_npu(index)
    if name == "cuda":
        from kvferry.common.device.cuda import open_cuda

        return open_cuda(index)
    if name == "auto":
        return _best(threads, index)
    from kvferry.common.device.cpu import CpuDevice
    from kvferry.common.device.native.select import cpu_ops

    return CpuDevice(threads, cpu_ops())


def _best(threads: int, index: int) -> Device:
    names: tuple[DeviceName, DeviceName] = ("npu", "cuda")
    for name, probe in zip(names, (_probe_npu, _probe_cuda), strict=True):
        if not probe().available:
            continue
        try:
            return select_device(name, threads, index)
        except DeviceUnavailableError as error:
            _LOG.warning("%s; the next best device is taken", error)
    return select_device("cpu", threads)


def _probe_npu() -> DeviceProbe:
    from kvferry.common.device.npu import probe_npu

    return probe_npu()


def _probe_cuda() -> DeviceProbe:
    from kvferry.common.device.cuda import probe_cuda

    return probe_cuda()


def _probe_cpu() -> DeviceProbe:
    import torch

    return DeviceProbe("cpu", True, f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}", 1)
