"""A node as a process of its own: loads the model, runs the shell, announces it, ends in order on SIGTERM.

The first SIGTERM or SIGINT drains; a second one ends at once. Exit code 0 when drained or stopped, 1 otherwise.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from kvferry.common.base.clock import MonotonicClock
from kvferry.common.base.errors import (
    KvferryError,
    ModelLoadError,
)
from kvferry.common.base.gc_freeze import freeze_loaded_objects
from kvferry.common.base.user_cache import cache_dir
from kvferry.common.cluster.actions import ExitProcess
from kvferry.common.cluster.node_role import MakeRoles
from kvferry.common.config.host import probe_host
from kvferry.common.config.resolve import NodeSettings, resolve_node
from kvferry.common.config.schema import ClusterConfig, NodeKind
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.device.select import select_device
from kvferry.common.models.load import load_model
from kvferry.common.node.build import NodeBuilder, Surroundings, advertised
from kvferry.common.node.memory import check_memory_fits
from kvferry.common.node.shell import NodeShell
from kvferry.common.parallel.collectives import ALONE
from kvferry.common.protocol.messages import Announce, Envelope
from kvferry.common.ranks.messages import RankSpec
from kvferry.common.ranks.team import RankTeam
from kvferry.common.transport.announce import Announcer
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.security import load_security

START_TIMEOUT_S = 60.0


def run_node(config: ClusterConfig, role: NodeKind, make_roles: MakeRoles) -> int:
    """Serve one role until told to end. Logging is set up by the caller.

    Returns the exit code; raises KvferryError when it cannot start.
    """
    log = logging.getLogger(f"kvferry.{role}")
    settings = _named(resolve_node(config, role, probe_host()))
    security = load_security(config.security, "node")
    proxies = config.discovery.announce_to
    if security is not None:
        proxies = security.completed("discovery.announce_to", proxies, "router")
    context = TransportContext(security)
    builder, shell = _build(config, settings, make_roles, log, context)
    thread = _ControlThread(shell)
    announcer = Announcer(context, proxies, config.timers, config.limits)
    try:
        with _signals(shell, log):
            thread.start()
            try:
                _announce(settings, builder, thread, announcer)
                freeze_loaded_objects()
                _tell_ready(log, settings.name, builder.model_info.name, shell.endpoint)
                ended = thread.wait()
            finally:
                announcer.close()
                thread.end()
    finally:
        context.close()
    log.info("%s ends: %s", settings.name, ended.reason)
    return last_word(ended.code, computes_on=shell.computes_on)


def last_word(code: int, *, computes_on: bool) -> int:
    """The exit code. Where a thread computes on, the process ends here: Python, as it ends, stops such a thread in the
    middle of C++ code, which the system counts as a crash (SIGABRT), whatever the exit code was to be."""
    if computes_on:
        os._exit(code)  # log lines are written as they come: nothing is lost
    return code


def _tell_ready(log: logging.Logger, name: str, model: str, endpoint: str) -> None:
    process = psutil.Process()
    # Of the whole process: importing torch is a large part of a small model's start.
    took_s, mib = time.time() - process.create_time(), process.memory_info().rss >> 20
    log.info("%s serves %s at %s: ready %.1f s after its process began, %d MiB", name, model, endpoint, took_s, mib)


def _named(settings: NodeSettings) -> NodeSettings:
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
        raise ModelLoadError("model.path is empty: name a HuggingFace directory or a GGUF file")
    device = select_device(settings.device, settings.threads, settings.device_index)
    device.activate_thread()
    team = _start_team(config, settings, log)
    try:
        loaded = load_model(
            Path(config.model.path),
            device=device,
            dtype=None if config.model.dtype == "auto" else config.model.dtype,
            max_model_len=settings.max_model_len,
            model_name=config.model.name or None,
            progress=os.isatty(2),
            packed_dir=cache_dir() / "packed" if config.node.share_weights else None,
            before=lambda footprint: check_memory_fits(footprint, settings, device),
            scheme=_scheme(config),
            collectives=ALONE if team is None else team.collectives,
        )
        around = Surroundings(context, MonotonicClock(), log, config.timers, config.limits)
        builder = NodeBuilder(loaded, device, settings, around, make_roles, team)
        return builder, builder.build()
    except BaseException:
        if team is not None:
            team.close()
        raise


def _scheme(config: ClusterConfig) -> WeightScheme | None:
    return None if config.model.quantization == "none" else config.model.quantization


def _start_team(config: ClusterConfig, settings: NodeSettings, log: logging.Logger) -> RankTeam | None:
    """The other ranks, loading their parts; None where there is one rank."""
    if settings.tensor_parallel == 1:
        return None
    spec = RankSpec(
        size=settings.tensor_parallel,
        model_path=config.model.path,
        dtype=None if config.model.dtype == "auto" else config.model.dtype,
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


def _announce(settings: NodeSettings, builder: NodeBuilder, thread: "_ControlThread", announcer: Announcer) -> None:
    shell = thread.shell
    if not shell.wait_bound(START_TIMEOUT_S) or not shell.endpoint:
        thread.wait()  # raises what went wrong
        raise KvferryError("the node did not start")
    announce = Announce(
        name=settings.name,
        role=settings.role,
        model=builder.model_info.name,
        endpoint=advertised(shell.endpoint, settings.advertise),
    )
    announcer.start(Envelope(builder.incarnation, builder.incarnation, announce))


@contextmanager
def _signals(shell: NodeShell, log: logging.Logger) -> Iterator[None]:
    """Drain at the first signal, end at the second."""
    seen: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        seen.append(number)
        if len(seen) == 1:
            shell.drain()
        else:
            shell.stop("stopped by a second signal")

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        if seen:
            log.info("asked to end by %s", signal.Signals(seen[0]).name)


class _ControlThread:
    """Runs a shell and keeps how it ended."""

    def __init__(self, shell: NodeShell) -> None:
        self.shell = shell
        self._ended: ExitProcess | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def wait(self) -> ExitProcess:
        """Wait for the end; signals are handled meanwhile. Raises what the thread raised."""
        while self._thread.is_alive():
            self._thread.join(0.2)
        if self._error is not None:
            raise self._error
        assert self._ended is not None
        return self._ended

    def end(self) -> None:
        """Whatever went wrong elsewhere: its sockets are closed before their context is."""
        if self._thread.is_alive():
            self.shell.stop("the process ends")
            self._thread.join(START_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._ended = self.shell.run()
        except BaseException as error:  # noqa: BLE001  carried over to the main thread, which raises it
            self._error = error
