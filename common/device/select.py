"""The registry of devices: opens a device by its configured name, and probes all of them.

`DEVICES` (common/config/schema.py, which must not import torch) maps each name to the module that defines its
`BACKEND`, in the order in which `auto` tries them. A module is imported only when its device is probed or opened.
"""

import logging
from importlib import import_module

from kvferry.common.base.errors import DeviceUnavailableError
from kvferry.common.config.schema import DEVICES, DeviceName
from kvferry.common.device.base import Backend, Device, DeviceProbe

_LOG = logging.getLogger("kvferry.device")


def known_devices() -> tuple[str, ...]:
    """The names of all devices, in order of preference."""
    return tuple(DEVICES)


def load_backend(name: str) -> Backend:
    """Import a device's module. Raises DeviceUnavailableError for an unknown name."""
    if name not in DEVICES:
        raise DeviceUnavailableError(f"device {name!r} is unknown; known are auto, {', '.join(DEVICES)}")
    backend: Backend = import_module(DEVICES[name]).BACKEND
    return backend


def probe_devices() -> tuple[DeviceProbe, ...]:
    """Probe every device, in order of preference. Never raises."""
    return tuple(load_backend(name).probe() for name in DEVICES)


def select_device(name: DeviceName, threads: int, index: int = 0) -> Device:
    """Open a device and bind the calling thread to it. `threads`: compute threads of the CPU; `index`: accelerator.

    `auto` opens the first available device; one that is available but cannot be opened is skipped with a warning. The
    last device, the CPU, is always available. Raises DeviceUnavailableError if a named device cannot be used.
    """
    if name != "auto":
        return load_backend(name).open(threads, index)
    *preferred, last = map(load_backend, DEVICES)
    for backend in preferred:
        if not backend.probe().available:
            continue
        try:
            return backend.open(threads, index)
        except DeviceUnavailableError as error:
            _LOG.warning("%s; trying the next device", error)
    return last.open(threads, index)
