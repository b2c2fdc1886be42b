"""Choosing a device on a machine that has only a CPU: clear refusals, and a probe that never raises."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from kvferry.common.base.errors import DeviceUnavailableError
from kvferry.common.device.npu_ops import NpuFeatures, npu_features
from kvferry.common.device.select import probe_devices, select_device

without_torch_npu = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is here")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")

ALL_OPS = (
    "npu_rms_norm", "npu_add_rms_norm", "npu_rotary_mul", "npu_swiglu", "_npu_reshape_and_cache",
    "npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score",
)  # fmt: skip


def test_the_probe_tells_of_every_device_in_order_of_preference():
    probes = probe_devices()
    assert [probe.name for probe in probes] == ["npu", "cuda", "cpu"]
    assert probes[2].available
    for probe in probes:
        assert probe.available == (probe.count > 0)
        assert probe.detail
        assert "\n" not in probe.detail


@without_torch_npu
def test_npu_is_refused_with_what_to_install():
    with pytest.raises(DeviceUnavailableError, match=r"npu:0 is not available: torch-npu is not installed: pip"):
        select_device("npu", threads=1)


@without_cuda
def test_cuda_is_refused_with_a_reason():
    with pytest.raises(DeviceUnavailableError, match=r"cuda:0 is not available: .*CUDA"):
        select_device("cuda", threads=1)


@without_torch_npu
@without_cuda
def test_auto_takes_the_cpu_where_there_is_nothing_else():
    assert select_device("auto", threads=1).name == "cpu"


def test_a_named_cpu_is_the_cpu():
    assert select_device("cpu", threads=1).torch_device == torch.device("cpu")


@pytest.mark.parametrize(
    "module",
    [
        "kvferry.common.device.select",
        "kvferry.common.models.load",
        "kvferry.common.node.process",
        "kvferry.ops.cli.main",
    ],
)
def test_autoload_is_off_before_torch_is_imported(module):
    """With torch-npu installed and no CANN, `import torch` would fail otherwise."""
    code = f"""
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"))
            sys.exit()
sys.meta_path.insert(0, Watch())
import {module}
import torch
"""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert done.stdout == "0\n"


@pytest.mark.parametrize("chip", ["Ascend910B1", "Ascend910B4-1", "Ascend910_9382"])
def test_kernels_of_the_second_and_third_generation(chip):
    features = npu_features(chip, ALL_OPS)
    assert features == NpuFeatures(True, True, True, cache_write="reshape_and_cache", attention=True)


@pytest.mark.parametrize("chip", ["Ascend910_9589", "Ascend950PR_9589"])
def test_kernels_of_the_fifth_generation(chip):
    features = npu_features(chip, ALL_OPS)
    assert features == NpuFeatures(True, True, True, cache_write="scatter_pa", attention=True)


@pytest.mark.parametrize("chip", ["Ascend310P3", "Ascend910A", "Ascend910ProB", ""])
def test_other_chips_write_and_attend_in_plain_torch(chip):
    features = npu_features(chip, ALL_OPS)
    assert features == NpuFeatures(True, True, True, cache_write="torch", attention=False)


def test_an_op_that_the_release_lacks_is_not_called():
    assert npu_features("Ascend910B1", ()) == NpuFeatures(False, False, False, cache_write="torch", attention=False)
    assert not npu_features("Ascend910B1", [name for name in ALL_OPS if name != "npu_add_rms_norm"]).norms
