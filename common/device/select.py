"""From the configuration's device name to a device. Imports a backend only when it is asked for.

Order of `auto`: npu, cuda, cpu. The CPU is always there, so `auto` does not raise.
"""

from typing import Literal

from common.device.base import Device, DeviceProbe

DeviceName = Literal["auto", "cpu", "cuda", "npu"]


def probe_devices() -> tuple[DeviceProbe, ...]:
    """What this machine has, in the order of preference. Never raises."""
    return _probe_npu(), _probe_cuda(), _probe_cpu()


def select_device(name: DeviceName, threads: int, index: int = 0) -> Device:
    """Open a device, binding the calling thread to it. `threads`: for work on the CPU; `index`: which accelerator.

    Raises DeviceUnavailableError, saying what is missing, when a device was named and is not there.
    """
    if name == "auto":
        name = _best()
    if name == "npu":
        from common.device.npu import open_npu

        return open_npu(index)
    if name == "cuda":
        from common.device.cuda import open_cuda

        return open_cuda(index)
    from common.device.cpu import CpuDevice

    return CpuDevice(threads)


def _best() -> DeviceName:
    if _probe_npu().available:
        return "npu"
    return "cuda" if _probe_cuda().available else "cpu"


def _probe_npu() -> DeviceProbe:
    from common.device.npu import probe_npu

    return probe_npu()


def _probe_cuda() -> DeviceProbe:
    from common.device.cuda import probe_cuda

    return probe_cuda()


def _probe_cpu() -> DeviceProbe:
    import torch

    return DeviceProbe("cpu", True, f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}", 1)
