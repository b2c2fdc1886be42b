"""The process of a rank other than 0: `python -m kvferry.common.ranks.agent`, with its RankSpec as JSON on stdin.

It computes and moves KV as rank 0 commands, and decides nothing. It ends when rank 0 sends Quit, when rank 0's process
ends (by parent-death signal), and on any failure: an incomplete set of ranks cannot compute.
"""

import logging
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import assert_never, cast

import msgspec

from kvferry.common.base.errors import InvariantError, KvferryError
from kvferry.common.base.gc_freeze import freeze_loaded_objects
from kvferry.common.base.ids import Incarnation
from kvferry.common.base.log import setup_logging
from kvferry.common.base.parent_death_signal import die_with_parent
from kvferry.common.cluster.events import (
    EngineFailed,
    KvFailed,
    KvSendFailed,
    LayersDone,
    PieceArrived,
    PieceBad,
    PieceSent,
    PiecesStopped,
    SessionClosed,
    StepDone,
    StepProgressed,
)
from kvferry.common.config.endpoints import endpoint_of_rank
from kvferry.common.device.base import Device
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.device.select import select_device
from kvferry.common.engine.engine_thread import EngineEvent, EngineThread
from kvferry.common.engine.host_cache import HostCache
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.engine.runner import ModelRunner
from kvferry.common.kv_transfer.build import make_mover
from kvferry.common.kv_transfer.interface import KvEvent, KvMover
from kvferry.common.models.load import DtypeName, LoadedModel, load_model
from kvferry.common.parallel.collectives import GroupCollectives
from kvferry.common.parallel.group import join_store, rendezvous
from kvferry.common.parallel.shard import Shard
from kvferry.common.ranks.link import FLUSH_INTERVAL_S, Outbound, from_lead, report_of
from kvferry.common.ranks.messages import (
    ClosePeer,
    Command,
    ComputeStep,
    Done,
    ExpectKv,
    ForgetKv,
    FromRank,
    Initialize,
    Loaded,
    OpenPeer,
    Quit,
    RankFailed,
    RankSpec,
    Ready,
    SendKv,
    StopKv,
    ToRank,
)
from kvferry.common.ranks.runner import SilentSampler
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.options import RANK_OPTIONS
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.security import load_security
from kvferry.common.transport.waker import Inbox, Waker

_ENGINE_JOIN_TIMEOUT_S = 2.0
_KILL_WAIT_S = 5.0
"""After a failure: time for rank 0 to receive the reason and to kill this process."""


class RankAgent:
    """One rank. The thread that calls `run` does all work except computing and moving KV, which have threads."""

    def __init__(self, spec: RankSpec, log: logging.Logger) -> None:
        self._spec = spec
        self._log = log
        self._context = TransportContext(load_security(spec.security, "node"))
        # Without keys: the link to rank 0 stays on loopback.
        self._link_context = TransportContext()
        self._link = LinkSocket(self._link_context, Incarnation(spec.self_id), RANK_OPTIONS)
        self._waker = Waker()
        self._inbox: Inbox[EngineEvent | KvEvent] = Inbox(self._waker)
        self._loop = PollLoop()
        self._inbound = from_lead()
        self._outbound: Outbound[FromRank] = Outbound()
        self._collectives = GroupCollectives(Shard(spec.rank, spec.size))
        self._device: Device | None = None
        self._model: LoadedModel | None = None
        self._engine: EngineThread | None = None
        self._kv: KvMover | None = None
        self._exit_code: int | None = None

    def run(self) -> int:
        """Serve until Quit or a failure; returns the exit code."""
        self._link.open()
        self._link.connect(self._spec.lead_endpoint)
        try:
            self._load()
            self._serve()
        except KvferryError as error:
            self._fail(str(error))
        except (RuntimeError, OSError) as error:  # out of memory, a rank missing at the rendezvous
            self._log.critical("rank %d", self._spec.rank, exc_info=error)
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._close()
        return self._exit_code or 0

    # -- stages

    def _load(self) -> None:
        spec = self._spec
        device = select_device(spec.settings.device, spec.settings.threads, spec.settings.device_index + spec.rank)
        device.activate_thread()
        self._model = load_model(
            Path(spec.model_path),
            device=device,
            dtype=cast(DtypeName | None, spec.dtype),
            scheme=cast(WeightScheme | None, spec.scheme),
            progress=False,
            collectives=self._collectives,
        )
        self._device = device
        self._send(Loaded(device.memory_info()[0]))

    def _initialize(self, message: Initialize) -> None:
        assert self._device is not None
        assert self._model is not None
        spec, device, model = self._spec, self._device, self._model
        block_size = device.supported_block_size(spec.settings.block_size)
        cache = KvCache(device, model.kv_specs, model.config.num_layers, message.num_blocks, block_size)
        timeout = timedelta(seconds=spec.timers.engine_stall_exit_s)
        rendezvous(self._collectives, device, join_store(spec.store_port, timeout), timeout)
        host_cache = HostCache(device, cache, message.num_host_blocks)
        runner = ModelRunner(model.model, cache, SilentSampler(), device, host_cache, self._collectives)
        self._engine = EngineThread(runner, device.activate_thread, self._inbox.put, self._log)
        self._kv = make_mover(
            self._context,
            message.incarnation,
            endpoint_of_rank(spec.settings.kv_bind, spec.rank),
            cache,
            spec.settings,
            spec.limits,
            spec.timers,
            device.activate_thread,
            self._inbox.put,
        )
        endpoint = self._kv.start()
        self._engine.start()
        freeze_loaded_objects()
        self._send(Ready(endpoint))

    def _serve(self) -> None:
        self._waker.open()
        self._loop.add(self._waker, self._drain_inbox)
        self._loop.add(self._link, self._receive)
        while self._exit_code is None:
            self._loop.run_once(FLUSH_INTERVAL_S if self._link.has_pending else None)
            self._link.flush()

    def _close(self) -> None:
        if self._exit_code:
            # Closing the socket would drop the failure message. Rank 0 kills this process when it has received it.
            self._link.flush()
            threading.Event().wait(_KILL_WAIT_S)
        if self._engine is not None and not self._engine.stop(_ENGINE_JOIN_TIMEOUT_S):
            os._exit(1)  # the engine is blocked in a collective operation that will not complete
        if self._kv is not None:
            self._kv.close()
        self._link.close()
        self._waker.close()
        self._context.close()
        self._link_context.close()

    # -- messages and events

    def _receive(self) -> None:
        for frames in self._link.receive():
            self._handle(self._inbound.message(frames))

    def _handle(self, message: ToRank) -> None:
        match message:
            case Initialize():
                self._initialize(message)
            case Quit():
                self._exit_code = 0
            case _:
                self._perform(message)

    def _perform(self, command: Command) -> None:
        if self._kv is None or self._engine is None:
            raise InvariantError(f"{type(command).__name__} before Initialize")
        match command:
            case ComputeStep(batch):
                self._engine.submit(batch)
            case SendKv(header, block_table):
                self._kv.send(header.piece(), block_table)
            case StopKv(key):
                self._kv.stop(key)
            case OpenPeer(peer, endpoint):
                self._kv.open(peer, endpoint)
            case ClosePeer(peer):
                self._kv.close_peer(peer)
            case ExpectKv(call, key, block_table, first_token):
                self._kv.expect(key, block_table, first_token)
                self._send(Done(call))
            case ForgetKv(call, key):
                self._kv.forget(key)
                self._send(Done(call))
            case _:
                assert_never(command)

    def _drain_inbox(self) -> None:
        for event in self._inbox.take_all():
            match event:
                case EngineFailed(reason) | KvFailed(reason):
                    self._fail(reason)
                case PieceSent() | PiecesStopped() | KvSendFailed() | PieceArrived() | PieceBad():
                    self._send(report_of(event))
                case LayersDone() | StepProgressed() | StepDone():
                    pass  # rank 0 reports the progress and the result of its own part, which hold for every rank
                case SessionClosed():
                    pass  # answers KvMover.close_session, which no message asks for: ranks have no staging slots
                case _:
                    assert_never(event)

    def _send(self, message: FromRank) -> None:
        self._link.send(self._outbound.frames(message))

    def _fail(self, reason: str) -> None:
        self._send(RankFailed(reason))
        self._exit_code = 1


def main() -> int:
    """Run one rank; returns the exit code."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    if not die_with_parent(spec.parent_pid, signal.SIGKILL):
        return 1
    # Ctrl-C or SIGTERM may reach the whole process group: rank 0 drains first, and sends Quit when it is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    setup_logging(spec.log, f"{spec.settings.name}/{spec.rank}")
    return RankAgent(spec, logging.getLogger("kvferry.rank")).run()


if __name__ == "__main__":
    sys.exit(main())
