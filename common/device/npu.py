"""An Ascend NPU: detection that never raises, and opening. The only module that imports torch_npu, and only on demand.

Layout: [num_blocks, block_size, kv_heads, head_dim], keys and values separate, blocks of 128 tokens, one allocation
per layer, aligned to 2 MiB as device-to-device transports require for registration. The device is bound per thread.
"""

import ctypes
import importlib.util
import os
from datetime import timedelta
from types import ModuleType

import torch

from kvferry.common.base.errors import DeviceUnavailableError
from kvferry.common.device.accelerator import Accelerator, CacheRules
from kvferry.common.device.base import Backend, Device, DeviceProbe, Group, Store
from kvferry.common.device.graphs import AcceleratorGraphs, Graphs
from kvferry.common.device.npu_graphs import NpuRecorder
from kvferry.common.device.npu_ops import NpuOps, causal_mask, npu_features

_RULES = CacheRules(alignment=2 << 20, block_size_multiple=128, block_size_max=512)
_GRAPHS_MOST_TOKENS = 1 << 20
"""The attention kernel reads only the actual lengths, however much the block tables cover."""
_RUNTIME_LIBRARY = "libascendcl.so"


def probe_npu() -> DeviceProbe:
    """Whether an NPU can be used here, else the first missing prerequisite. Never raises, starts no process."""
    if importlib.util.find_spec("torch_npu") is None:
        return _missing("torch-npu is not installed: pip install -e '.[npu]' in kvferry's directory")
    try:
        ctypes.CDLL(_RUNTIME_LIBRARY)
    except OSError as error:
        return _missing(f"CANN cannot be loaded ({error}): source its set_env.sh before starting kvferry")
    try:
        torch_npu = _import_torch_npu()
        count = int(torch_npu.npu.device_count())
        detail = str(torch_npu.npu.get_device_name(0)) if count else _none_visible()
    except Exception as error:  # noqa: BLE001  a broken installation may raise anything; a probe must not
        return _missing(f"torch_npu cannot be used: {_first_line(error)}")
    return DeviceProbe("npu", count > 0, detail, count)


def open_npu(index: int = 0) -> Device:
    """Bind the calling thread to NPU `index` and make the ops. Raises DeviceUnavailableError naming what is missing.

    Must run in the process that serves: the runtime does not survive a fork.
    """
    probe = probe_npu()
    if index >= probe.count:
        reason = f"only {probe.count} visible ({probe.detail})" if probe.count else probe.detail
        raise DeviceUnavailableError(f"device npu:{index} is not available: {reason}")
    try:
        return _open(index)
    except RuntimeError as error:
        # The first call to the device: a broken driver, or exclusive use by another process, shows here.
        raise DeviceUnavailableError(f"device npu:{index} cannot be opened: {_first_line(error)}") from error


BACKEND = Backend(probe_npu, lambda threads, index: open_npu(index), device_files=("davinci[0-9]*",))


def _open(index: int) -> Device:
    torch_npu = _import_torch_npu()
    device = torch.device("npu", index)
    torch_npu.npu.set_device(device)
    features = npu_features(str(torch_npu.npu.get_device_name(index)), dir(torch_npu))
    ops = NpuOps(torch_npu, features, causal_mask(device))
    npu = torch_npu.npu

    def make_graphs() -> Graphs:
        return AcceleratorGraphs(npu, npu.Stream(device), NpuRecorder(npu).record, _GRAPHS_MOST_TOKENS)

    return Accelerator(device, ops, npu, _RULES, npu.Stream(device), _hccl, make_graphs)


def _hccl(store: Store, rank: int, size: int, timeout: timedelta) -> Group:
    kind = _import_torch_npu()._C._distributed_c10d.ProcessGroupHCCL
    options = kind.Options()
    options._timeout = timeout
    group: Group = kind(store, rank, size, options)
    return group


def _import_torch_npu() -> ModuleType:
    import torch_npu  # not at the top: without CANN this import fails

    return torch_npu  # type: ignore[no-any-return]


def _none_visible() -> str:
    chosen = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    hint = f"ASCEND_RT_VISIBLE_DEVICES={chosen}" if chosen is not None else "is /dev/davinci* there?"
    return f"no NPU visible ({hint})"


def _missing(detail: str) -> DeviceProbe:
    return DeviceProbe("npu", False, detail)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
