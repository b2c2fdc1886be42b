"""A router worker of the simulated world, with the real router core, and its clients. Decides nothing."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError, KvferryError
from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.events import Event
from kvferry.common.config.protocol import Limits, Timers
from kvferry.ops.simulate.clock import EventLoop
from kvferry.ops.simulate.network import Network
from kvferry.ops.simulate.process import Process
from kvferry.router.api import EndEvent, GenerateRequest, StreamEvent
from kvferry.router.core.effects import Deliver, Effect, FinishRequest
from kvferry.router.core.router_core import RouterCore


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Configuration of a router worker, the same for all its incarnations."""

    name: str
    timers: Timers = field(default_factory=Timers)
    limits: Limits = field(default_factory=Limits)
    tick_s: float = 0.05


@dataclass(slots=True)
class SimulatedStream:
    """The stream of one request as its client sees it."""

    request: GenerateRequest
    sent_at: float
    worker: "SimWorker"
    events: list[tuple[float, StreamEvent]] = field(default_factory=list)
    refused: KvferryError | None = None
    left_at: float | None = None
    token_ids: list[int] = field(default_factory=list)

    @property
    def end(self) -> EndEvent | None:
        """The last event if it is an end."""
        last = self.events[-1][1] if self.events else None
        return last if isinstance(last, EndEvent) else None

    @property
    def over(self) -> bool:
        """No event can follow: ended, refused, or the worker has ended."""
        return self.end is not None or self.refused is not None or not self.worker.alive


class SimWorker(Process):
    """One incarnation of a router worker."""

    def __init__(
        self, loop: EventLoop, network: Network, spec: WorkerSpec, incarnation: Incarnation, rng: random.Random
    ) -> None:
        super().__init__(loop, network, spec.name, incarnation, f"sim://{spec.name}", spec.tick_s)
        self.spec = spec
        self.core = RouterCore(spec.name, spec.timers, spec.limits, rng)
        self.streams: dict[RequestId, SimulatedStream] = {}
        """Open streams."""
        self.on_stream_event: Callable[[SimulatedStream, StreamEvent], None] | None = None

    def add_static_nodes(self, addresses: Sequence[str]) -> None:
        """Connect to the nodes of the static configuration."""
        for address in addresses:
            self.perform(self.core.add_static(address, self.loop.now()))

    def submit(self, stream: SimulatedStream) -> None:
        """Receive the request of a client."""
        self.when_awake(self._submit, stream)

    def _submit(self, stream: SimulatedStream) -> None:
        self.streams[stream.request.request_id] = stream
        try:
            effects = self.core.submit(stream.request, self.loop.now())
        except KvferryError as error:
            stream.refused = error
            del self.streams[stream.request.request_id]
            return
        if self.trace is not None:
            self.trace(self, f"submit {stream.request.request_id[:8]}")
        self.perform(effects)

    def leave(self, stream: SimulatedStream) -> None:
        """Close the connection of the client."""
        self.when_awake(self._leave, stream)

    def _leave(self, stream: SimulatedStream) -> None:
        if stream.request.request_id in self.streams:
            stream.left_at = self.loop.now()
            self.perform(self.core.cancel(stream.request.request_id, "client left", self.loop.now()))

    def react(self, event: Event, now: float) -> list[Effect]:
        """See Process."""
        return self.core.handle(event, now)

    def perform_own(self, action: object) -> None:
        """See Process: events for clients."""
        if not isinstance(action, Deliver | FinishRequest):
            raise InvariantError(f"router worker {self.host} received an unknown action: {action!r}")
        stream = self.streams[action.request_id]
        if isinstance(action, FinishRequest):
            del self.streams[action.request_id]
        stream.events.append((self.loop.now(), action.event))
        if self.on_stream_event is not None:
            self.on_stream_event(stream, action.event)

    def check_invariants(self) -> None:
        """See Process."""
        self.core.check_invariants()

    def drain(self) -> None:
        """SIGTERM: refuse new requests; end when all streams are over."""
        self.when_awake(self._drain)

    def _drain(self) -> None:
        self.perform(self.core.drain(self.loop.now()))
        self._end_when_empty()

    def _end_when_empty(self) -> None:
        if not self.alive:
            return
        if self.core.requests:
            self.loop.after(self.tick_s, self.when_awake, self._end_when_empty)
            return
        self.perform(self.core.close(self.loop.now()))
        self.loop.after(0.05, self.end, "drained")
