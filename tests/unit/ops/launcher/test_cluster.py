"""The children of a cluster, their configuration, and gunicorn's settings."""

import runpy
import signal
import sys
from pathlib import Path

import pytest

from kvferry.common.config.docs import config_as_toml
from kvferry.common.config.host import HostFacts
from kvferry.common.config.load import load_config
from kvferry.common.config.schema import ClusterConfig
from kvferry.ops import model_store
from kvferry.ops.launcher.cluster import (
    CONFIG_ENV,
    WORKER_CLASS,
    cluster_children,
    restart_limits,
    router_children,
    router_config,
    serve_config,
)
from kvferry.ops.launcher.core import Stage
from tests.unit.common.config.test_checks import load_set

RUN_DIR = Path("/run/kvferry-0-x")
FILE = RUN_DIR / "cluster.toml"


def served(*settings: str, run_dir: Path = RUN_DIR) -> ClusterConfig:
    host = HostFacts(cores=4, free_memory_bytes=10 << 30)
    return serve_config(load_set(*settings), run_dir, model_path="/m/a.gguf", name="a", port=1234, host=host)


def test_the_childrens_configuration_is_resolved():
    config = served()
    assert (config.model.path, config.model.name, config.router.port) == ("/m/a.gguf", "a", 1234)
    assert config.discovery.announce_to == (config.discovery.proxy_nodes,)
    assert config.discovery.proxy_nodes == f"ipc://{RUN_DIR}/announce"
    assert config.discovery.proxy_workers == f"ipc://{RUN_DIR}/members"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (("model.path=/nowhere/a.gguf",), "a"),
        (("model.path=/nowhere/a.gguf", "model.name=b"), "b"),
        ((), model_store.MODEL_NAME),
    ],
)
def test_a_router_knows_the_models_name_without_its_files(settings: tuple[str, ...], name: str):
    config = router_config(load_set(*settings), 1234)
    assert (config.model.name, config.router.port) == (name, 1234)


def test_nodes_share_the_memory_beyond_their_kv_caches():
    caches = ("prefill.kv_cache_bytes=1073741824", "decode.kv_cache_bytes=2147483648", "serve.decode=2")
    assert served(*caches).node.model_memory_bytes == (5 << 30) // 3
    assert served(*caches, "node.model_memory_bytes=5").node.model_memory_bytes == 5
    assert served("node.kv_cache_bytes=21474836480").node.model_memory_bytes == 1


def test_drains_are_capped_by_the_stop_bound():
    timers = served("serve.stop_timeout_s=20", "timers.node_drain_s=7").timers
    assert (timers.worker_drain_s, timers.node_drain_s) == (20, 7)


def test_configured_endpoints_are_kept():
    chosen = served("discovery.proxy_nodes=tcp://127.0.0.1:7", "discovery.announce_to=['tcp://127.0.0.1:7']").discovery
    assert chosen.proxy_nodes == "tcp://127.0.0.1:7"


def test_a_cluster_has_a_proxy_a_router_and_nodes():
    config = served("serve.prefill=2", "serve.decode=1")
    children = cluster_children(config, FILE, RUN_DIR, 5)
    assert [(child.plan.name, child.plan.stage) for child in children] == [
        ("proxy", Stage.PROXY),
        ("router", Stage.ROUTER),
        ("prefill-0", Stage.PREFILL),
        ("prefill-1", Stage.PREFILL),
        ("decode-0", Stage.DECODE),
    ]
    for child in children:
        assert child.argv[0] == sys.executable
        assert str(FILE) in child.argv or child.env[CONFIG_ENV] == str(FILE)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (("serve.colocated=2",), ["colocated-0", "colocated-1"]),
        (("serve.colocated=1", "serve.prefill=1"), ["prefill-0", "colocated-0"]),
        (
            ("serve.colocated=1", "serve.prefill=1", "serve.decode=2"),
            ["prefill-0", "decode-0", "decode-1", "colocated-0"],
        ),
    ],
)
def test_colocated_nodes_replace_other_nodes_or_are_added(settings: tuple[str, ...], names: list[str]):
    """They stop with the decode nodes: prefill nodes hand requests over to them until then."""
    nodes = cluster_children(served(*settings), FILE, RUN_DIR, 5)[2:]
    assert [child.plan.name for child in nodes] == names
    assert {child.plan.stage for child in nodes if child.plan.name.startswith("colocated")} == {Stage.DECODE}


def test_the_stop_bound_of_a_child_exceeds_its_drain():
    config = served("serve.stop_timeout_s=20")
    for child in cluster_children(config, FILE, RUN_DIR, 5):
        drain_s = {Stage.ROUTER: 20, Stage.PREFILL: 20, Stage.DECODE: 20, Stage.PROXY: 0}[child.plan.stage]
        assert child.plan.stop_timeout_s > drain_s


def test_gunicorn_gets_the_listening_socket_and_an_empty_metrics_directory():
    (_, router) = router_children(served(), FILE, RUN_DIR, 5)
    assert router.pass_fds == (5,)
    assert "fd://5" in router.argv
    assert router.fresh_dirs == (RUN_DIR / "metrics",)
    assert router.env["PROMETHEUS_MULTIPROC_DIR"] == str(RUN_DIR / "metrics")
    assert router.death_signal == signal.SIGKILL


def test_without_proxy_endpoints_there_is_only_gunicorn():
    config = load_set("discovery.proxy_nodes=''", "router.nodes=['tcp://127.0.0.1:7']")
    assert [child.plan.name for child in router_children(config, FILE, RUN_DIR, 5)] == ["router"]


def test_restart_limits_are_configurable():
    limits = restart_limits(load_set("serve.restart_min_s=1", "serve.restart_max_s=2", "serve.healthy_after_s=3"))
    assert (limits.min_s, limits.max_s, limits.healthy_after_s) == (1, 2, 3)


@pytest.mark.parametrize(("host", "bind"), [("0.0.0.0", "0.0.0.0:8000"), ("::1", "[::1]:8000")])
def test_gunicorn_is_configured_from_the_clusters_file(tmp_path: Path, monkeypatch, host: str, bind: str):
    file = tmp_path / "cluster.toml"
    file.write_text(config_as_toml(load_set(f"router.host='{host}'", "router.port=8000", "router.workers=3")))
    monkeypatch.setenv(CONFIG_ENV, str(file))
    settings = runpy.run_module("kvferry.ops.launcher.gunicorn_conf")
    assert (settings["bind"], settings["workers"]) == (bind, 3)
    assert settings["graceful_timeout"] >= load_config(file).timers.worker_drain_s
    assert settings["max_requests"] == 0
    assert settings["preload_app"] is False
    assert settings["control_socket_disable"] is True
    assert settings["worker_class"] == WORKER_CLASS
