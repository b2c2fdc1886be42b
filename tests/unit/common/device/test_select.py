"""The device registry on a machine with only a CPU: clear refusals, a probe that never raises, a made-up device."""

import ast
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch

from kvferry.common.base.errors import DeviceUnavailableError
from kvferry.common.config import schema
from kvferry.common.config.host import HostFacts
from kvferry.common.config.resolve import resolve_node
from kvferry.common.config.schema import DEVICES
from kvferry.common.device import select
from kvferry.common.device.base import Backend, Device, DeviceProbe
from kvferry.common.device.npu_ops import NpuFeatures, npu_features
from kvferry.common.device.select import known_devices, load_backend, probe_devices, select_device
from kvferry.common.models.load import load_model
from kvferry.common.node.memory import kv_cache_bytes
from tests.support.engine_driver import EngineDriver
from tests.support.paged_device import PagedDevice
from tests.support.tiny_llama import make_checkpoint, random_prompt, reference_tokens

without_torch_npu = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is here")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")

ALL_OPS = (
    "npu_rms_norm", "npu_add_rms_norm", "npu_rotary_mul", "npu_swiglu", "_npu_reshape_and_cache",
    "npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score",
)  # fmt: skip


class MadeUpDevice(PagedDevice):
    """Memory of its own, otherwise computes on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "madeup"
        self.shares_host_memory = False
        self.default_steps_in_flight = 2


def register(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    """Do what a new device needs: a module with BACKEND, and a line in DEVICES, here as the preferred device."""
    module = ModuleType("made_up_device")
    module.BACKEND = backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(select, "DEVICES", {"madeup": module.__name__, **DEVICES})


def open_made_up(threads: int, index: int) -> Device:
    return MadeUpDevice()


PRESENT = Backend(lambda: DeviceProbe("madeup", True, "it is made up", 1), open_made_up)


@pytest.mark.parametrize("name", ["madeup", "auto"])
def test_a_registered_device_is_served_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = make_checkpoint(tmp_path)
    register(monkeypatch, PRESENT)
    assert known_devices()[0] == probe_devices()[0].name == "madeup"
    device = select_device(name, threads=1)
    assert device.name == "madeup"
    driver = EngineDriver(load_model(tmp_path, device=device, progress=False), device)
    sequence = driver.add(random_prompt(3, 20))
    driver.generate([sequence], 6)
    assert sequence.output == reference_tokens(reference, random_prompt(3, 20), 6)
    settings = resolve_node(schema.ClusterConfig(), "decode", HostFacts(cores=2, free_memory_bytes=8 << 30))
    assert kv_cache_bytes(settings, device, 1000) == 900, "a device with memory of its own gets a share of that"


def test_auto_skips_a_device_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(threads: int, index: int) -> Device:
        raise DeviceUnavailableError("device madeup:0 cannot be opened: busy")

    register(monkeypatch, Backend(PRESENT.probe, refuse))
    with caplog.at_level(logging.WARNING, "kvferry.device"):
        assert select_device("auto", threads=1).name != "madeup"
    assert "device madeup:0 cannot be opened: busy; trying the next device" in caplog.text
    with pytest.raises(DeviceUnavailableError, match="busy"):
        select_device("madeup", threads=1)


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DeviceUnavailableError, match=r"device 'gpu' is unknown; known are auto, npu, cuda, cpu"):
        load_backend("gpu")


def test_the_configuration_accepts_exactly_the_registered_devices() -> None:
    assert set(get_args(schema.DeviceName)) == {"auto", *DEVICES}


ROOT = Path(__file__).parents[4]
IMPLEMENTATIONS = (*DEVICES.values(), "kvferry.common.device.accelerator")


def device_checks(source: str) -> Iterator[int]:
    """The lines that compare with a device's name, use it as a key, or import a device's class."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            parts: list[ast.expr] = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.ImportFrom) and node.module in IMPLEMENTATIONS:
            yield node.lineno
            continue
        else:
            continue
        constants = (leaf for part in parts for leaf in ast.walk(part) if isinstance(leaf, ast.Constant))
        if any(leaf.value in DEVICES for leaf in constants if isinstance(leaf.value, str)):
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        'on_cpu = device.name == "cpu"',
        'x = 1 if device.torch_device.type in ("npu", "cuda") else 2',
        'FILES = {"npu": 3}',
        'match name:\n    case "cuda":\n        pass',
        "from kvferry.common.device.cpu import CpuDevice",
    ],
)
def test_a_check_of_the_device_is_found(source: str) -> None:
    assert list(device_checks(source))


def test_no_module_outside_the_device_package_asks_which_device_it_runs_on() -> None:
    """A device states what it needs (`Device`, `Backend`); see common/device/base.py."""
    folders = ("common", "router", "prefill_node", "decode_node", "ops")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    outside = [file for file in files if not file.is_relative_to(ROOT / "common" / "device")]
    assert len(outside) > 200
    found = [f"{file}:{line}" for file in outside for line in device_checks(file.read_text())]
    assert [where for where in found if "common/config/schema.py" not in where] == [], "a device's name is asked for"


def test_every_device_is_probed_in_order_of_preference():
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
def test_auto_falls_back_to_the_cpu():
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
    """Otherwise `import torch` would fail with torch-npu installed but no CANN."""
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


def test_an_op_missing_from_the_release_is_not_called():
    assert npu_features("Ascend910B1", ()) == NpuFeatures(False, False, False, cache_write="torch", attention=False)
    assert not npu_features("Ascend910B1", [name for name in ALL_OPS if name != "npu_add_rms_norm"]).norms
