"""Which decode steps a node records, and the memory that its KV cache leaves for them."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.common.config.host import HostFacts
from kvferry.common.config.resolve import NodeSettings, resolve_node
from kvferry.common.config.schema import ClusterConfig, NodeConfig, NodeKind, RoleConfig
from kvferry.common.device.base import Device
from kvferry.common.engine.decode_graphs import GraphSize
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.models.load import LoadedModel, load_model
from kvferry.common.node.graphs import GraphPlan, plan_graphs, record_graphs
from tests.support.paged_device import PagedDevice
from tests.support.replayed_graphs import GraphDevice
from tests.support.tiny_families import make_family_checkpoint
from tests.support.tiny_llama import make_checkpoint

HOST = HostFacts(cores=4, free_memory_bytes=8 << 30)
SIZES = (GraphSize(1, 32), GraphSize(2, 32), GraphSize(3, 32))


def settings(role: NodeKind = "decode", **node: object) -> NodeSettings:
    node_config = NodeConfig(max_running=3, **node)  # type: ignore[arg-type]
    return resolve_node(ClusterConfig(node=node_config, decode=RoleConfig()), role, HOST)


def loaded_on(device: Device, path: Path, family: str = "") -> LoadedModel:
    make_family_checkpoint(path, family) if family else make_checkpoint(path)
    return load_model(path, device=device, dtype="float32", progress=False)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded_on(PagedDevice(), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("max_running", "wanted"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (128, (1, 2, 4, 8, 16, 32, 64, 128))]
)
def test_default_batch_sizes_are_powers_of_two_and_max_running(max_running: int, wanted: tuple[int, ...]) -> None:
    config = ClusterConfig(node=NodeConfig(max_running=max_running))
    assert resolve_node(config, "decode", HOST).graph_batch_sizes == wanted
    assert resolve_node(config, "colocated", HOST).graph_batch_sizes == wanted
    assert resolve_node(config, "prefill", HOST).graph_batch_sizes == ()


def test_configured_batch_sizes_are_limited_to_max_running() -> None:
    assert settings(graph_batch_sizes=(2, 3, 4)).graph_batch_sizes == (2, 3)
    assert settings(graph_batch_sizes=()).graph_batch_sizes == ()


def test_nothing_is_recorded_without_support_or_decode_steps(loaded: LoadedModel, tmp_path: Path) -> None:
    device = GraphDevice()
    assert plan_graphs(settings(), loaded, PagedDevice()) == GraphPlan()
    assert plan_graphs(settings("prefill"), loaded, device) == GraphPlan()
    assert plan_graphs(settings(graph_batch_sizes=()), loaded, device) == GraphPlan()
    assert plan_graphs(replace(settings(), tensor_parallel=2), loaded, device) == GraphPlan()
    experts = loaded_on(device, tmp_path, "qwen3_moe")
    assert plan_graphs(settings(), experts, device) == GraphPlan()
    cache = KvCache(device, loaded.kv_specs, loaded.config.num_layers, 4, 16)
    assert record_graphs(GraphPlan(), loaded, cache, device) is None


def test_the_cache_leaves_the_memory_that_recording_takes(loaded: LoadedModel) -> None:
    device = GraphDevice()
    free = iter((9000, 8000, 7900))
    device.memory_info = lambda: (next(free), 10000)
    assert plan_graphs(settings(), loaded, device) == GraphPlan(SIZES, 1, 1000 + 2 * 100)


def test_nothing_is_measured_for_a_cache_of_configured_size(loaded: LoadedModel) -> None:
    device = GraphDevice()
    device.memory_info = lambda: pytest.fail("free memory was queried")
    plan = plan_graphs(settings(kv_cache_bytes=1 << 20), loaded, device)
    assert plan == GraphPlan(SIZES, 1, 0)
    cache = KvCache(device, loaded.kv_specs, loaded.config.num_layers, 4, 16, plan.num_scratch_blocks)
    assert record_graphs(plan, loaded, cache, device) is not None


def test_a_device_that_fails_to_record_serves_without_graphs(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> None:
        raise RuntimeError("out of memory")

    device = GraphDevice()
    device.synchronize = failing
    with caplog.at_level(logging.WARNING, logger="kvferry.engine"):
        assert plan_graphs(settings(), loaded, device) == GraphPlan()
    assert [record.getMessage() for record in caplog.records] == ["decode steps are not recorded: out of memory"]
