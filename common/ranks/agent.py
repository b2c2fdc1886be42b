"""A rank other than 0, as a process: `python -m kvferry.common.ranks.agent`, its RankSpec as JSON on standard input.

It computes what it is told and moves the KV that it is told to; it decides nothing. It ends when rank 0 says so, when
rank 0 ends (the kernel sees to that), and when anything fails: what is left of a model cannot compute.
"""

import logging
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import cast

import msgspec

from kvferry.common.base.errors import (
    InvariantError,
    KvferryError,
)
from kvferry.common.base.gc_freeze import freeze_loaded_objects
from kvferry.common.base.ids import Incarnation
from kvferry.common.base.log import setup_logging
from kvferry.common.base.parent_death_signal import die_with_parent
from kvferry.common.cluster.events import (
    EngineFailed,
    Event,
    KvFailed,
    KvSendFailed,
    PieceArrived,
    PieceBad,
    PieceSent,
    PiecesStopped,
)
from kvferry.common.config.endpoints import endpoint_of_rank
from kvferry.common.device.base import Device
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.device.select import select_device
from kvferry.common.engine.engine_thread import EngineThread
from kvferry.common.engine.host_cache import HostCache
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.engine.runner import ModelRunner
from kvferry.common.kv_transfer.build import make_mover
from kvferry.common.kv_transfer.interface import KvMover
from kvferry.common.models.load import DtypeName, LoadedModel, load_model
from kvferry.common.parallel.collectives import GroupCollectives
from kvferry.common.parallel.group import join_store, meet
from kvferry.common.parallel.shard import Shard
from kvferry.common.ranks import messages
from kvferry.common.ranks.messages import (
    Begin,
    Done,
    FromRank,
    Loaded,
    Outbound,
    Quit,
    RankFailed,
    RankSpec,
    Ready,
    RunPlan,
    ToRank,
)
from kvferry.common.ranks.runner import SilentSampler
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.options import RANK_OPTIONS
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.security import load_security
from kvferry.common.transport.waker import (
    Inbox,
    Waker,
)

ENGINE_STOP_S = 2.0
FLUSH_S = 0.01
LAST_WORDS_S = 5.0


class RankAgent:
    """One rank. Everything is done by the thread that calls `run`, but computing and moving, which have their own."""

    def __init__(self, spec: RankSpec, log: logging.Logger) -> None:
        self._spec = spec
        self._log = log
        self._context = TransportContext(load_security(spec.security, "node"))
        self._link_context = TransportContext()
        self._link = LinkSocket(self._link_context, Incarnation(spec.self_id), RANK_OPTIONS)
        self._wakeup = Waker()
        self._inbox: Inbox[Event] = Inbox(self._wakeup)
        self._loop = PollLoop()
        self._incoming = messages.from_lead()
        self._outgoing: Outbound[FromRank] = Outbound()
        self._collectives = GroupCollectives(Shard(spec.rank, spec.size))
        self._device: Device | None = None
        self._model: LoadedModel | None = None
        self._engine: EngineThread | None = None
        self._kv: KvMover | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Until the end; returns the exit code."""
        self._link.open()
        self._link.connect(self._spec.lead)
        try:
            self._load()
            self._serve()
        except KvferryError as error:
            self._fail(str(error))
        except (RuntimeError, OSError) as error:  # out of memory, a rank that did not come
            self._log.critical("rank %d", self._spec.rank, exc_info=error)
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._close()
        return self._code or 0

    # -- the stages

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
        self._say(Loaded(device.memory_info()[0]))

    def _begin(self, begin: Begin) -> None:
        assert self._device is not None
        assert self._model is not None
        spec, device, model = self._spec, self._device, self._model
        block_size = device.supported_block_size(spec.settings.block_size)
        cache = KvCache(device, model.kv_specs, model.config.num_layers, begin.num_blocks, block_size)
        timeout = timedelta(seconds=spec.timers.engine_stall_exit_s)
        meet(self._collectives, device, join_store(spec.store_port, timeout), timeout)
        host_cache = HostCache(device, cache, begin.num_host_blocks)
        runner = ModelRunner(model.model, cache, SilentSampler(), device, host_cache, self._collectives)
        self._engine = EngineThread(runner, device.activate_thread, self._inbox.put, self._log)
        self._kv = make_mover(
            self._context,
            begin.incarnation,
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
        self._say(Ready(endpoint))

    def _serve(self) -> None:
        self._wakeup.open()
        self._loop.add(self._wakeup, self._report)
        self._loop.add(self._link, self._receive)
        while self._code is None:
            self._loop.run_once(FLUSH_S if self._link.has_pending else None)
            self._link.flush()

    def _close(self) -> None:
        if self._code:
            # Until rank 0 has heard why: it ends this process then. A socket that is closed drops what it has to say.
            self._link.flush()
            threading.Event().wait(LAST_WORDS_S)
        if self._engine is not None and not self._engine.stop(ENGINE_STOP_S):
            os._exit(1)  # it waits for ranks that do not come; nothing here is worth waiting for
        if self._kv is not None:
            self._kv.close()
        self._link.close()
        self._wakeup.close()
        self._context.close()
        self._link_context.close()

    # -- what comes and goes

    def _receive(self) -> None:
        for frames in self._link.receive():
            self._take(self._incoming.message(frames))

    def _take(self, message: ToRank) -> None:
        match message:
            case Begin():
                self._begin(message)
                return
            case Quit():
                self._code = 0
                return
        if self._kv is None or self._engine is None:
            raise InvariantError(f"{type(message).__name__} before Begin")
        match message:
            case RunPlan(plan):
                self._engine.submit(plan)
            case messages.SendKv(header, block_table):
                self._kv.send(header.piece(), block_table)
            case messages.StopKv(key):
                self._kv.stop(key)
            case messages.OpenPeer(peer, endpoint):
                self._kv.open(peer, endpoint)
            case messages.ClosePeer(peer):
                self._kv.close_peer(peer)
            case messages.ExpectKv(call, key, block_table, first_token):
                self._kv.expect(key, block_table, first_token)
                self._say(Done(call))
            case messages.ForgetKv(call, key):
                self._kv.forget(key)
                self._say(Done(call))

    def _report(self) -> None:
        for event in self._inbox.take_all():
            match event:
                case EngineFailed(reason) | KvFailed(reason):
                    self._fail(reason)
                case PieceSent(key, number):
                    self._say(messages.Sent(key, number))
                case PiecesStopped(key):
                    self._say(messages.Stopped(key))
                case KvSendFailed(key, reason):
                    self._say(messages.SendFailed(key, reason))
                case PieceArrived(piece):
                    self._say(messages.Arrived(messages.PieceHeader.of(piece)))
                case PieceBad(key, number, reason):
                    self._say(messages.Bad(key, number, reason))
                case _:
                    pass  # rank 0's own results are the node's

    def _say(self, message: FromRank) -> None:
        self._link.send(self._outgoing.frames(message))

    def _fail(self, reason: str) -> None:
        self._say(RankFailed(reason))
        self._code = 1


def main() -> int:
    """Be a rank."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    if not die_with_parent(spec.parent_pid, signal.SIGKILL):
        return 1
    # A Ctrl-C or a SIGTERM for the whole group: rank 0 drains, and says Quit when it is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    setup_logging(spec.log, f"{spec.settings.name}/{spec.rank}")
    return RankAgent(spec, logging.getLogger("kvferry.rank")).run()


if __name__ == "__main__":
    sys.exit(main())
