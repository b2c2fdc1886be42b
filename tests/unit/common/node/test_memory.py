"""A node that does not fit is rejected with numbers before any weight is read; the stated need is sufficient."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.host import HostFacts
from kvferry.common.config.resolve import NodeSettings, resolve_node
from kvferry.common.device.base import Device
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.cpu_ops import CpuOps
from kvferry.common.models.footprint import Footprint
from kvferry.common.models.load import load_model
from kvferry.common.node.memory import check_memory_fits
from tests.support.tiny_llama import make_checkpoint
from tests.unit.common.config.test_checks import load_set

MIB = 1 << 20
NEED = Footprint(weights=100 * MIB, loading=20 * MIB, per_step_token=1024, per_sampled=4096)
HOST = HostFacts(cores=2, free_memory_bytes=1000 * MIB)


class FixedMemory:
    """A device with a fixed amount of free memory."""

    def __init__(self, free: int, shares_host_memory: bool) -> None:
        self.shares_host_memory = shares_host_memory
        self.torch_device = torch.device("cpu")
        self._free = free

    def memory_info(self) -> tuple[int, int]:
        return self._free, 2 * self._free


def device(free_mib: int, shares_host_memory: bool = True) -> Device:
    return cast(Device, FixedMemory(free_mib * MIB, shares_host_memory))


def settings(*overrides: str) -> NodeSettings:
    return resolve_node(load_set("node.kv_cache_bytes=52428800", *overrides), "decode", HOST)


def test_a_node_that_fits_is_accepted() -> None:
    check_memory_fits(NEED, settings(), device(170))
    check_memory_fits(NEED, settings(f"node.model_memory_bytes={120 * MIB}"), device(170))


def test_a_node_that_needs_more_than_is_free_is_rejected() -> None:
    with pytest.raises(ConfigError) as error:
        check_memory_fits(NEED, settings(), device(169))
    message = str(error.value)
    assert message.startswith(
        "node.kv_cache_bytes: this node needs 170 MiB (weights 100, KV cache 50, computing 20 MiB)"
    )
    assert "169 MiB are free" in message


def test_swap_counts_only_on_a_cpu() -> None:
    swap = f"node.swap_bytes={30 * MIB}"
    check_memory_fits(NEED, settings(swap), device(200))
    with pytest.raises(ConfigError, match=r"needs 200 MiB .weights 100, KV cache 50, swap 30, computing 20 MiB"):
        check_memory_fits(NEED, settings(swap), device(199))
    check_memory_fits(NEED, settings(swap), device(170, shares_host_memory=False))


def test_a_node_that_needs_more_than_its_share_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^node.model_memory_bytes: this node needs 120 MiB .* may take 119 MiB"):
        check_memory_fits(NEED, settings(f"node.model_memory_bytes={119 * MIB}"), device(1000))


def test_memory_of_large_steps_counts() -> None:
    check_memory_fits(NEED, settings("node.max_step_tokens=4096"), device(170))
    with pytest.raises(ConfigError, match="computing 65 MiB"):
        check_memory_fits(NEED, settings("node.max_step_tokens=65536", "node.max_running=256"), device(170))


def test_an_accelerators_cache_of_default_size_counts_as_zero() -> None:
    accelerator = device(120, shares_host_memory=False)
    without_cache_size = replace(settings("node.model_memory_bytes=1"), kv_cache_bytes=None)
    check_memory_fits(NEED, without_cache_size, accelerator)
    with pytest.raises(ConfigError, match="KV cache 50"):
        check_memory_fits(NEED, settings(), accelerator)


def footprint_of(path: Path, dtype: str) -> Footprint:
    seen: list[Footprint] = []
    load_model(path, device=CpuDevice(1), dtype=dtype, progress=False, before=seen.append)  # type: ignore[arg-type]
    return seen[0]


def test_weights_are_counted_in_their_format_in_memory(tmp_path: Path) -> None:
    itemsize = CpuOps().packed_itemsize(torch.bfloat16)
    tied = make_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    embedding = tied.model.embed_tokens.weight.numel()
    others = sum(parameter.numel() for parameter in tied.parameters()) - embedding
    assert footprint_of(tmp_path / "tied", "float32").weights == 4 * (others + 2 * embedding)
    assert footprint_of(tmp_path / "tied", "bfloat16").weights == itemsize * (others + embedding) + 2 * embedding
    untied = make_checkpoint(tmp_path / "untied", tie_word_embeddings=False)
    total = sum(parameter.numel() for parameter in untied.parameters())
    assert footprint_of(tmp_path / "untied", "float32").weights == 4 * total


def test_no_weight_of_a_rejected_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path)

    def reject(footprint: Footprint) -> None:
        raise ConfigError("no")

    monkeypatch.setattr("kvferry.common.models.weights_hf.HfWeights.get", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ConfigError):
        load_model(tmp_path, device=CpuDevice(1), progress=False, before=reject)
