"""The children of a cluster, and the configuration that they get. Starts nothing and writes nothing.

By default the discovery endpoints are sockets in the run directory, so two clusters on one machine stay separate.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvferry.common.base.python_command import python_command
from kvferry.common.config.host import HostFacts
from kvferry.common.config.resolve import node_counts, share_model_memory
from kvferry.common.config.schema import ClusterConfig, DiscoveryConfig, NodeKind
from kvferry.ops.launcher.core import ChildPlan, Stage
from kvferry.ops.launcher.process import ChildSpec
from kvferry.ops.launcher.restart_policy import RestartLimits
from kvferry.ops.model_choice import served_name

CONFIG_ENV = "KVFERRY_CONFIG"
"""Environment variable with the path of the cluster's file, for gunicorn's configuration and its workers."""

WORKER_CLASS = "kvferry.ops.launcher.worker.RouterWorker"

_KILL_MARGIN_S = 5.0
_PROXY_STOP_S = 5.0
_STAGES: dict[NodeKind, Stage] = {"prefill": Stage.PREFILL, "decode": Stage.DECODE, "colocated": Stage.DECODE}
"""A colocated node stops with the decode nodes: prefill nodes may hand requests over to it until they have stopped."""


def restart_limits(config: ClusterConfig) -> RestartLimits:
    serve = config.serve
    return RestartLimits(serve.restart_min_s, serve.restart_max_s, serve.healthy_after_s)


def serve_config(
    config: ClusterConfig, run_dir: Path, *, model_path: str, name: str, port: int, host: HostFacts
) -> ClusterConfig:
    """The configuration of the children of `kvferry serve`: all defaults resolved, drains within
    serve.stop_timeout_s."""
    bound = config.serve.stop_timeout_s
    timers = msgspec.structs.replace(
        config.timers,
        worker_drain_s=min(config.timers.worker_drain_s, bound),
        node_drain_s=min(config.timers.node_drain_s, bound),
    )
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=model_path, name=name),
        node=msgspec.structs.replace(
            config.node, model_memory_bytes=config.node.model_memory_bytes or share_model_memory(config, host)
        ),
        router=msgspec.structs.replace(config.router, port=port),
        discovery=_private_discovery(config.discovery, run_dir),
        timers=timers,
    )


def router_config(config: ClusterConfig, port: int) -> ClusterConfig:
    """The configuration of the children of `kvferry router`. It names the model, which workers need before a node has
    announced itself."""
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, name=served_name(config)),
        router=msgspec.structs.replace(config.router, port=port),
    )


def proxy_child(config_file: Path) -> ChildSpec:
    return ChildSpec(
        ChildPlan("proxy", Stage.PROXY, _PROXY_STOP_S),
        python_command("kvferry.ops.launcher.proxy_main", str(config_file)),
    )


def node_child(config: ClusterConfig, config_file: Path, role: NodeKind, index: int) -> ChildSpec:
    """A node named ROLE-INDEX."""
    name = _node_name(role, index)
    command = python_command(
        "kvferry.ops.cli.main", role, "--config", str(config_file), "--set", f'{role}.name="{name}"'
    )
    plan = ChildPlan(name, _STAGES[role], config.timers.node_drain_s + _KILL_MARGIN_S)
    return ChildSpec(plan, command)


def node_names(config: ClusterConfig) -> frozenset[str]:
    """Names of the nodes of `kvferry serve`."""
    return frozenset(_node_name(role, index) for role, index in _nodes(config))


def router_child(config: ClusterConfig, config_file: Path, run_dir: Path, listen_fd: int) -> ChildSpec:
    """gunicorn and its workers, on the listening socket `listen_fd`."""
    metrics = run_dir / "metrics"
    command = python_command(
        "kvferry.ops.launcher.gunicorn_main",
        *("-c", "python:kvferry.ops.launcher.gunicorn_conf", "--no-control-socket", "--bind", f"fd://{listen_fd}"),
        *("--worker-class", WORKER_CLASS, "kvferry.ops.launcher.asgi:create_app()"),
    )
    return ChildSpec(
        ChildPlan("router", Stage.ROUTER, config.timers.worker_drain_s + 2 * _KILL_MARGIN_S),
        command,
        env={CONFIG_ENV: str(config_file), "PROMETHEUS_MULTIPROC_DIR": str(metrics)},
        pass_fds=(listen_fd,),
        # It leaves no state behind, and without a launcher there is no reason to drain.
        death_signal=signal.SIGKILL,
        fresh_dirs=(metrics,),
    )


def cluster_children(config: ClusterConfig, config_file: Path, run_dir: Path, listen_fd: int) -> tuple[ChildSpec, ...]:
    """All children of `kvferry serve`."""
    nodes = [node_child(config, config_file, role, index) for role, index in _nodes(config)]
    return (*router_children(config, config_file, run_dir, listen_fd), *nodes)


def router_children(config: ClusterConfig, config_file: Path, run_dir: Path, listen_fd: int) -> tuple[ChildSpec, ...]:
    """All children of `kvferry router`: gunicorn, and this host's proxy if it has one."""
    router = router_child(config, config_file, run_dir, listen_fd)
    return (proxy_child(config_file), router) if config.discovery.proxy_nodes else (router,)


def _private_discovery(discovery: DiscoveryConfig, run_dir: Path) -> DiscoveryConfig:
    """Endpoints in the run directory, unless the user configured some."""
    nodes, workers = run_dir / "announce", run_dir / "members"
    if discovery != DiscoveryConfig():
        return discovery
    return msgspec.structs.replace(
        discovery, announce_to=(f"ipc://{nodes}",), proxy_nodes=f"ipc://{nodes}", proxy_workers=f"ipc://{workers}"
    )


def _nodes(config: ClusterConfig) -> Iterator[tuple[NodeKind, int]]:
    for role, number in node_counts(config).items():
        for index in range(number):
            yield role, index


def _node_name(role: NodeKind, index: int) -> str:
    return f"{role}-{index}"
