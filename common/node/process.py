"""The process of a node: loads the model, runs the shell, announces the node, drains on SIGTERM or SIGINT.

A second signal ends it without draining. Exit code 0 when drained or stopped, 1 otherwise.
"""

import logging
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import psutil

from kvferry.common.base.clock import MonotonicClock
from kvferry.common.base.errors import ModelLoadError
from kvferry.common.base.gc_freeze import freeze_loaded_objects
from kvferry.common.base.user_cache import cache_dir
from kvferry.common.cluster.node_role import MakeRoles
from kvferry.common.config.host import probe_host
from kvferry.common.config.resolve import NodeSettings, resolve_node
from kvferry.common.config.schema import ClusterConfig, NodeKind
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.device.select import select_device
from kvferry.common.models.load import DtypeName, load_model
from kvferry.common.node.build import NodeBuilder, NodeEnvironment
from kvferry.common.node.control_thread import ControlThread, drain_on_signals
from kvferry.common.node.identity import advertised_endpoint
from kvferry.common.node.memory import check_memory_fits
from kvferry.common.node.shell import NodeShell
from kvferry.common.parallel.collectives import ALONE
from kvferry.common.protocol.messages import Announce, Envelope
from kvferry.common.ranks.messages import RankSpec
from kvferry.common.ranks.team import RankTeam
from kvferry.common.transport.announce import Announcer
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.security import load_security


def run_node(config: ClusterConfig, role: NodeKind, make_roles: MakeRoles) -> int:
    """Serve one role until a signal or a failure ends the node; returns the exit code.

    Raises KvferryError when the node cannot start. The caller must have set up logging.
    """
    log = logging.getLogger(f"kvferry.{role}")
    settings = _with_name(resolve_node(config, role, probe_host()))
    security = load_security(config.security, "node")
    proxies = config.discovery.announce_to
    if security is not None:
        proxies = security.completed("discovery.announce_to", proxies, "router")
    context = TransportContext(security)
    builder, shell = _build(config, settings, make_roles, log, context)
    thread = ControlThread(shell)
    announcer = Announcer(context, proxies, config.timers, config.limits)
    try:
        with drain_on_signals(shell, log):
            thread.start()
            try:
                thread.wait_bound()
                announcer.start(_announcement(settings, builder, shell))
                freeze_loaded_objects()
                _log_ready(log, settings.name, builder.model_info.name, shell.endpoint)
                ended = thread.wait()
            finally:
                announcer.close()
                thread.end()
    finally:
        context.close()
    log.info("%s ends: %s", settings.name, ended.reason)
    return exit_code(ended.code, engine_still_runs=shell.engine_still_runs)


def exit_code(code: int, *, engine_still_runs: bool) -> int:
    """Return `code`, or end the process with it here if the engine thread still runs.

    When Python ends, it stops such a thread in the middle of C++ code, which aborts the process (SIGABRT) whatever its
    exit code should be.
    """
    if engine_still_runs:
        os._exit(code)  # loses no log lines: they are written immediately
    return code


def _log_ready(log: logging.Logger, name: str, model: str, endpoint: str) -> None:
    process = psutil.Process()
    # Since the start of the process: importing torch is a large part of a small model's start time.
    took_s, mib = time.time() - process.create_time(), process.memory_info().rss >> 20
    log.info("%s serves %s at %s: ready %.1f s after its process began, %d MiB", name, model, endpoint, took_s, mib)


def _with_name(settings: NodeSettings) -> NodeSettings:
    name = settings.name or f"{settings.role}-{socket.gethostname()}-{os.getpid()}"
    return replace(settings, name=name)


def _build(
    config: ClusterConfig,
    settings: NodeSettings,
    make_roles: MakeRoles,
    log: logging.Logger,
    context: TransportContext,
) -> tuple[NodeBuilder, NodeShell]:
    if not config.model.path:
        raise ModelLoadError("model.path is empty; set it to a HuggingFace directory or a GGUF file")
    device = select_device(settings.device, settings.threads, settings.device_index)
    device.activate_thread()
    team = _start_team(config, settings, log)
    try:
        loaded = load_model(
            Path(config.model.path),
            device=device,
            dtype=_dtype(config),
            max_model_len=settings.max_model_len,
            model_name=config.model.name or None,
            progress=os.isatty(2),
            packed_dir=cache_dir() / "packed" if config.node.share_weights else None,
            before=lambda footprint: check_memory_fits(footprint, settings, device),
            scheme=_scheme(config),
            collectives=ALONE if team is None else team.collectives,
        )
        environment = NodeEnvironment(context, MonotonicClock(), log, config.timers, config.limits)
        builder = NodeBuilder(loaded, device, settings, environment, make_roles, team)
        return builder, builder.build()
    except BaseException:
        if team is not None:
            team.close()
        raise


def _start_team(config: ClusterConfig, settings: NodeSettings, log: logging.Logger) -> RankTeam | None:
    """Start the other ranks, which load their parts; None if there is only one rank."""
    if settings.tensor_parallel == 1:
        return None
    spec = RankSpec(
        size=settings.tensor_parallel,
        model_path=config.model.path,
        dtype=_dtype(config),
        scheme=_scheme(config),
        settings=settings,
        limits=config.limits,
        timers=config.timers,
        log=config.log,
        security=config.security,
    )
    team = RankTeam(spec, log)
    team.start()
    return team


def _dtype(config: ClusterConfig) -> DtypeName | None:
    return None if config.model.dtype == "auto" else config.model.dtype


def _scheme(config: ClusterConfig) -> WeightScheme | None:
    return None if config.model.quantization == "none" else config.model.quantization


def _announcement(settings: NodeSettings, builder: NodeBuilder, shell: NodeShell) -> Envelope:
    announce = Announce(
        name=settings.name,
        role=settings.role,
        model=builder.model_info.name,
        endpoint=advertised_endpoint(shell.endpoint, settings.advertise),
    )
    return Envelope(builder.incarnation, builder.incarnation, announce)
