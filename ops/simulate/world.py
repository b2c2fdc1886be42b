"""A whole cluster in virtual time: nodes, router workers, clients, network. Seeded: the same calls give the same run.

Injects no faults and checks no results; tests and sizing do so from outside.
"""

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.events import Announced
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Announce
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.ops.simulate.clock import EventLoop
from kvferry.ops.simulate.kv_network import KvNetwork
from kvferry.ops.simulate.network import Delays, Network
from kvferry.ops.simulate.node import MODEL_NAME, NodeSpec, SimNode
from kvferry.ops.simulate.process import Process
from kvferry.ops.simulate.worker import SimulatedStream, SimWorker, WorkerSpec
from kvferry.router.api import GenerateRequest


@dataclass(slots=True)
class World:
    """All processes, networks and client streams of a simulated cluster."""

    seed: int
    timers: Timers = field(default_factory=Timers)
    delays: Delays = field(default_factory=Delays)
    static: bool = True
    """Workers have the nodes in their configuration; False: nodes announce themselves."""
    loop: EventLoop = field(default_factory=EventLoop)
    rng: random.Random = field(init=False)
    network: Network = field(init=False)
    kv: KvNetwork = field(init=False)
    nodes: dict[str, SimNode] = field(default_factory=dict)
    """Name -> latest incarnation."""
    workers: dict[str, SimWorker] = field(default_factory=dict)
    streams: list[SimulatedStream] = field(default_factory=list)
    check_every: int = 0
    trace: Callable[[Process, object], None] | None = None
    on_new_process: Callable[[Process], None] | None = None

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.network = Network(self.loop, random.Random(self.rng.getrandbits(64)), self.timers, self.delays)
        self.kv = KvNetwork(self.loop, random.Random(self.rng.getrandbits(64)))

    # -- processes

    def start_node(self, spec: NodeSpec) -> SimNode:
        """Start a node: its first incarnation, or the next one at the same address."""
        node = SimNode(self.loop, self.network, self.kv, spec, self._new_incarnation())
        self.nodes[spec.name] = node
        self._begin(node)
        if not self.static:
            self._announce(node)
        return node

    def start_worker(self, spec: WorkerSpec) -> SimWorker:
        """Start a router worker: its first incarnation, or the next one of the same name."""
        rng = random.Random(self.rng.getrandbits(64))
        worker = SimWorker(self.loop, self.network, spec, self._new_incarnation(), rng)
        self.workers[spec.name] = worker
        self._begin(worker)
        if self.static:
            worker.add_static_nodes([node.spec.address for node in self.nodes.values()])
        return worker

    def processes(self) -> list[Process]:
        """Return the live processes."""
        return [process for process in (*self.workers.values(), *self.nodes.values()) if process.alive]

    def restart(self, process: Process) -> Process:
        """Start a new incarnation of a process that ended."""
        if isinstance(process, SimNode):
            return self.start_node(process.spec)
        assert isinstance(process, SimWorker)
        return self.start_worker(process.spec)

    # -- clients

    def send_request(
        self,
        worker: SimWorker,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 5,
        timeout_s: float = 600.0,
    ) -> SimulatedStream:
        """Send the request of a client now; return its stream."""
        request = GenerateRequest(
            request_id=RequestId(f"{self.rng.getrandbits(128):032x}"),
            spec=RequestSpec(
                model=MODEL_NAME,
                prompt_token_ids=array("I", prompt_token_ids),
                output_token_ids=array("I"),
                sampling=sampling,
                priority=priority,
            ),
            timeout_s=timeout_s,
        )
        stream = SimulatedStream(request, self.loop.now(), worker)
        self.streams.append(stream)
        worker.submit(stream)
        return stream

    # -- inside

    def _new_incarnation(self) -> Incarnation:
        return Incarnation(f"{self.rng.getrandbits(120) | 1 << 126:032x}")

    def _begin(self, process: Process) -> None:
        process.check_every = self.check_every
        process.trace = self.trace
        if self.on_new_process is not None:
            self.on_new_process(process)
        process.start(self.rng)

    def _announce(self, node: SimNode) -> None:
        if not node.alive:
            return
        if not node.asleep:
            role = node.spec.roles[0]
            announce = Announce(name=node.host, role=role, model=node.spec.model.name, endpoint=node.address)
            for worker in self.workers.values():
                self.loop.after(0.001, worker.post, Announced(node.incarnation, announce))
        self.loop.after(self.timers.heartbeat_s, self._announce, node)
