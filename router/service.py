"""The router worker's shell: performs the effects of the core, in one asyncio loop. Decides nothing about requests.

Implements `router.api.TokenService`. Must be started after the fork, in the worker's own loop: incarnation, sockets and
context must not be shared with another process.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import assert_never

from kvferry.common.base.clock import Clock
from kvferry.common.base.errors import InvariantError, UnavailableError
from kvferry.common.base.ids import RequestId, new_incarnation
from kvferry.common.cluster.actions import (
    BindPeer,
    CloseKv,
    CloseLink,
    CloseSession,
    ExitProcess,
    ExpectPieces,
    ForgetPieces,
    OpenKv,
    OpenLink,
    Probe,
    ResetLink,
    RunStep,
    Send,
    SendHello,
    SendPiece,
    StopPieces,
)
from kvferry.common.cluster.events import Announced, Event, Tick
from kvferry.common.cluster.links import LinkState
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Announce, Envelope
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.common.transport.announce import AnnouncementListener
from kvferry.common.transport.async_receiver import AsyncReceiver
from kvferry.common.transport.async_watcher import AsyncWatcher
from kvferry.common.transport.client_links import ClientLinks
from kvferry.common.transport.context import TransportContext
from kvferry.router.api import EndEvent, GenerateRequest, NodeState, NodeStatus, ServiceCounts, StreamEvent, TokenStream
from kvferry.router.core.effects import Deliver, Effect, FinishRequest
from kvferry.router.core.router_core import RouterCore

TICK_S = 0.05
LAST_HEARTBEAT_S = 0.05
"""Time for ZeroMQ to send the last heartbeats. If they are lost, nodes only wait for the silence instead."""
_STATE_NAMES: dict[LinkState, NodeState] = {
    LinkState.CONNECTING: "connecting",
    LinkState.ALIVE: "alive",
    LinkState.SUSPECT: "suspect",
    LinkState.DEAD: "dead",
    LinkState.REFUSED: "refused",
}


class QueuedStream:
    """The TokenStream that the service returns: a queue that the service fills and one reader empties."""

    def __init__(self, request_id: RequestId, on_cancel: Callable[[RequestId, str], None]) -> None:
        self.request_id = request_id
        self._on_cancel = on_cancel
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._ended = False

    def put(self, event: StreamEvent) -> None:
        """Add an event; must not be called after an EndEvent."""
        self._events.put_nowait(event)
        self._ended = self._ended or isinstance(event, EndEvent)

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        """Yield the events in order, up to the EndEvent."""
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, EndEvent):
                return

    def cancel(self, reason: str) -> None:
        """Stop the request; no effect after its end."""
        if not self._ended:
            self._on_cancel(self.request_id, reason)


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings of a worker's service."""

    name: str
    timers: Timers
    limits: Limits
    static_nodes: tuple[str, ...] = ()
    announcements: str = ""
    """Endpoint of this host's announcement proxy; empty: static nodes only."""
    start_wait_s: float = 0.0
    """How long `start` waits for a first pair of nodes: a new worker must not refuse what others would serve."""
    configured_models: tuple[str, ...] = ()
    """Models that are answered with 503 instead of 404 before a node has registered them."""


class RouterService:
    """The requests and links of one worker. Call `start`, then `submit` any number of times, then `stop`."""

    def __init__(self, settings: ServiceSettings, clock: Clock, context: TransportContext, log: logging.Logger) -> None:
        self._settings = settings
        self._clock = clock
        self._context = context
        self._log = log
        self._core = RouterCore(settings.name, settings.timers, settings.limits, random.Random())
        self._links: ClientLinks | None = None
        self._watcher: AsyncWatcher | None = None
        self._listener: AnnouncementListener | None = None
        self._announcements: AsyncReceiver[Envelope] | None = None
        self._streams: dict[RequestId, QueuedStream] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._last_tick = clock.now()

    # -- start and stop

    async def start(self) -> None:
        """Choose the incarnation, open the sockets, start ticking, wait for a first pair of nodes."""
        self_id, settings = new_incarnation(), self._settings
        self._watcher = AsyncWatcher(asyncio.get_running_loop())
        self._links = ClientLinks(
            self._context, self_id, settings.limits, settings.timers, self._watcher, self.on_event, self._log
        )
        for endpoint in settings.static_nodes:
            self._perform(self._core.add_static(endpoint, self._clock.now()))
        if settings.announcements:
            self._listen(settings.announcements)
        self._ticker = asyncio.get_running_loop().create_task(self._tick())
        await self._await_first_pair(self._clock.now() + settings.start_wait_s)

    async def _await_first_pair(self, until: float) -> None:
        while self._core.not_ready_reason(None) is not None and self._clock.now() < until:
            await asyncio.sleep(TICK_S)

    def _listen(self, endpoint: str) -> None:
        self._listener = AnnouncementListener(self._context, self._settings.limits)
        self._listener.connect(endpoint)
        receiver = AsyncReceiver(asyncio.get_running_loop(), self._listener, self._on_announcement)
        receiver.open()
        self._announcements = receiver

    def _on_announcement(self, envelope: Envelope) -> None:
        if isinstance(envelope.message, Announce):
            self.on_event(Announced(envelope.sender, envelope.message))

    def drain(self) -> None:
        """Accept nothing new; streams continue."""
        self._perform(self._core.drain(self._clock.now()))

    async def stop(self) -> None:
        """End all requests, send the nodes a last heartbeat, close all sockets."""
        if self._ticker is not None:
            self._ticker.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticker
        self._perform(self._core.close(self._clock.now()))
        await asyncio.sleep(LAST_HEARTBEAT_S)
        if self._announcements is not None:
            self._announcements.close()
        if self._listener is not None:
            self._listener.close()
        if self._watcher is not None:
            await self._watcher.close()
        if self._links is not None:
            self._links.close_all()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Advance the core's time."""
        now = self._clock.now()
        # After a sleep (process stopped, loop held) waiting messages come first: uvloop runs timers before it reads
        # sockets, and a waiting message may end the silence or meet the deadline that the tick would act on.
        if self._watcher is not None and now - self._last_tick > TICK_S + self._settings.timers.late_tick_s:
            self._watcher.drain()
        self._last_tick = now
        self.on_event(Tick())
        if self._links is not None:
            self._links.flush()

    # -- TokenService, for the HTTP layer

    def model(self, name: str) -> ModelInfo | None:
        found = self._core.models.get(name)
        if found is None and name in self._settings.configured_models:
            raise UnavailableError(f"no node serves the model {name} yet")
        if not self._core.models:
            raise UnavailableError("no node has registered yet")
        return found

    def models(self) -> tuple[ModelInfo, ...]:
        return tuple(self._core.models.values())

    def not_ready_reason(self, model: str | None = None) -> str | None:
        return self._core.not_ready_reason(model)

    def submit(self, request: GenerateRequest) -> TokenStream:
        stream = QueuedStream(request.request_id, self._cancel)
        self._streams[request.request_id] = stream
        try:
            effects = self._core.submit(request, self._clock.now())
        except BaseException:
            del self._streams[request.request_id]
            raise
        self._perform(effects)
        return stream

    def nodes(self) -> tuple[NodeStatus, ...]:
        found = []
        for link in self._core.links.links.values():
            draining = link.status is not None and link.status.draining and link.state is LinkState.ALIVE
            found.append(
                NodeStatus(
                    name=link.welcome.name if link.welcome else link.endpoint,
                    roles=link.welcome.roles if link.welcome else (),
                    model=link.welcome.model.name if link.welcome else "",
                    state="draining" if draining else _STATE_NAMES[link.state],
                    detail=link.refusal,
                )
            )
        return tuple(found)

    def counts(self) -> ServiceCounts:
        usage: dict[str, float] = {}
        hits: dict[str, float] = {}
        preemptions: dict[str, int] = {}
        swaps: dict[str, int] = {}
        for model in self._core.models:
            loads = [
                (link.welcome.roles, link.status.load)
                for link in self._core.links.by_peer.values()
                if link.status is not None and link.welcome is not None and link.welcome.model.name == model
            ]
            total = sum(load.total_blocks for roles, load in loads if "decode" in roles)
            free = sum(load.free_blocks for roles, load in loads if "decode" in roles)
            prompt = sum(load.prompt_tokens for _, load in loads)
            usage[model] = 1.0 - free / total if total else 0.0
            hits[model] = sum(load.prefix_hit_tokens for _, load in loads) / prompt if prompt else 0.0
            preemptions[model] = sum(load.preemptions for _, load in loads)
            swaps[model] = sum(load.swaps for _, load in loads)
        return ServiceCounts(usage, hits, preemptions, swaps)

    # -- effects

    @property
    def core(self) -> RouterCore:
        """The core, for checks of its invariants."""
        return self._core

    def on_event(self, event: Event) -> None:
        """Pass an event to the core and perform its effects."""
        self._perform(self._core.handle(event, self._clock.now()))

    def _cancel(self, request_id: RequestId, reason: str) -> None:
        self._perform(self._core.cancel(request_id, reason, self._clock.now()))

    def _perform(self, effects: list[Effect]) -> None:
        assert self._links is not None
        links = self._links
        for effect in effects:
            match effect:
                case Deliver(request_id, event):
                    self._streams[request_id].put(event)
                case FinishRequest(request_id, end):
                    self._streams.pop(request_id).put(end)
                case Send(peer, message):
                    links.send(peer, message)
                case SendHello(endpoint, message):
                    links.send_unaddressed(endpoint, message)
                case OpenLink(endpoint):
                    links.open(endpoint)
                case CloseLink(endpoint):
                    links.close(endpoint)
                case ResetLink(endpoint):
                    links.reset(endpoint)
                case BindPeer(endpoint, peer):
                    links.bind_peer(endpoint, peer)
                case Probe(endpoint):
                    links.probe(endpoint)
                case (
                    RunStep() | SendPiece() | StopPieces() | OpenKv() | CloseKv() | ExpectPieces() | ForgetPieces()
                    | CloseSession() | ExitProcess()
                ):  # fmt: skip
                    raise InvariantError(f"a router worker cannot perform {effect}: it is an action of nodes")
                case _:
                    assert_never(effect)
