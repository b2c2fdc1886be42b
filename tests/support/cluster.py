"""A whole cluster in one process: the router's real application and service, real nodes, real ZeroMQ, a real model.

Nodes are threads; endpoints are `inproc` unless a test says otherwise. At the end everything must be at the baseline:
no request, no block, no entry, no socket, no thread, no descriptor left.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from kvferry.common.base.clock import MonotonicClock
from kvferry.common.cluster.actions import ExitProcess
from kvferry.common.cluster.node_core import NodeCore
from kvferry.common.cluster.node_role import MakeRoles
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.config.schema import NODE_KINDS, KvTransportName, NodeKind, RouterConfig
from kvferry.common.device.base import Device
from kvferry.common.engine.kv_cache import bytes_per_token
from kvferry.common.models.load import LoadedModel
from kvferry.common.node.build import NodeBuilder, NodeEnvironment
from kvferry.common.node.shell import NodeShell
from kvferry.common.transport.context import TransportContext
from kvferry.decode_node.role import make_decode_role
from kvferry.ops.roles import make_colocated_roles
from kvferry.prefill_node.role import make_prefill_role
from kvferry.router.http.app import AppDependencies, create_app
from kvferry.router.http.metrics import RouterMetrics
from kvferry.router.http.shell import AsgiShell
from kvferry.router.service import RouterService, ServiceSettings
from tests.support.bodies import body_of
from tests.support.eventually import PATIENCE_S, POLL_S, eventually
from tests.support.keys import KeyRing
from tests.support.pause import PausePoints
from tests.support.timers import PATIENT
from tests.support.transport import large_frame_sent, num_fds

_numbers = itertools.count()
_MAKE_ROLES: dict[NodeKind, MakeRoles] = {
    "prefill": lambda context: (make_prefill_role(context),),
    "decode": lambda context: (make_decode_role(context),),
    "colocated": make_colocated_roles,
}
MODEL = "tiny"


@dataclass(frozen=True)
class ClusterOptions:
    """What a test may choose."""

    prefill: int = 1
    decode: int = 1
    colocated: int = 0
    scheme: str = "inproc"
    block_size: int = 4
    num_blocks: int = 256
    num_host_blocks: int = 0
    """Of each decode node."""
    max_step_tokens: int = 32
    max_running: int = 32
    steps_in_flight: int = 2
    graph_batch_sizes: tuple[int, ...] = ()
    """Without effect where the device has no graphs."""
    prefix_cache: bool = True
    checksum: bool = True
    kv_transports: tuple[KvTransportName, ...] = ("zmq",)
    timers: Timers = PATIENT
    limits: Limits = field(default_factory=Limits)
    keys: bool = False
    """CURVE on every socket; not for inproc."""
    router: RouterConfig = field(default_factory=lambda: RouterConfig(max_input_length=400))


class NodeThread:
    """One node of the cluster. `kill` ends it without a message to any peer."""

    def __init__(self, name: str, role: NodeKind, shell: NodeShell, pauses: PausePoints) -> None:
        self.name = name
        self.role = role
        self.shell = shell
        self.pauses = pauses
        self.ended: ExitProcess | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()
        assert self.shell.wait_bound(PATIENCE_S)
        if self.error is not None:
            raise self.error

    def kill(self) -> None:
        self.shell.stop("killed by the test")
        self.pauses.release_all()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    async def ask(self, function: Any) -> Any:
        """Evaluate a function of the core on the node's own thread."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def run(core: NodeCore) -> None:
            try:
                value = function(core)
            except BaseException as error:  # noqa: BLE001  raised again where it was asked
                loop.call_soon_threadsafe(answer.set_exception, error)
            else:
                loop.call_soon_threadsafe(answer.set_result, value)

        self.shell.call(run)
        return await asyncio.wait_for(answer, PATIENCE_S)

    def _run(self) -> None:
        try:
            self.ended = self.shell.run()
        except BaseException as error:  # noqa: BLE001  raised again when the cluster stops
            self.error = error


class Cluster:
    """Everything a test needs. Made by `running_cluster`."""

    def __init__(self, loaded: LoadedModel, device: Device, options: ClusterOptions, run_dir: str) -> None:
        self.options = options
        self.loaded = loaded
        self._device = device
        self._number = next(_numbers)
        self._run_dir = run_dir
        keys = KeyRing(Path(run_dir) / "keys") if options.keys else None
        self.context = TransportContext(keys.security("router") if keys else None)
        # What has another key has another context; inproc needs a common one.
        self.node_context = TransportContext(keys.security("node")) if keys else self.context
        self.clock = MonotonicClock()
        self.log = logging.getLogger("tests.cluster")
        self.nodes: dict[str, NodeThread] = {}
        self.dead: list[NodeThread] = []
        self.service: RouterService
        self.app: AsgiShell
        self.http: httpx.AsyncClient

    # -- life

    async def start(self) -> None:
        for role in NODE_KINDS:
            for index in range(getattr(self.options, role)):
                self.add_node(f"{role}-{index}", role)
        settings = ServiceSettings(
            name=f"worker-{self._number}",
            timers=self.options.timers,
            limits=self.options.limits,
            static_nodes=tuple(node.shell.endpoint for node in self.nodes.values()),
        )
        self.service = RouterService(settings, self.clock, self.context, self.log)
        deps = AppDependencies(
            service=self.service,
            settings=self.options.router,
            metrics=RouterMetrics(CollectorRegistry()),
            access_log=logging.getLogger("tests.cluster.access"),
            logger=self.log,
        )
        self.app = create_app(deps)
        # falcon's own test client says that the client left as soon as the body is read, or polls without a pause.
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")
        await self.service.start()
        await eventually(lambda: self.service.not_ready_reason(MODEL) is None, "the cluster is ready")

    def add_node(self, name: str, role: NodeKind, *, bind: str | None = None) -> NodeThread:
        """Start a node; `bind` makes it take a dead one's place."""
        pauses = PausePoints()
        settings = self._settings(name, role, bind)
        environment = NodeEnvironment(
            self.node_context, self.clock, self.log, self.options.timers, self.options.limits, wrap_runner=pauses.wrap
        )
        builder = NodeBuilder(self.loaded, self._device, settings, environment, _MAKE_ROLES[role])
        node = self.nodes[name] = NodeThread(name, role, builder.build(), pauses)
        node.start()
        return node

    def kill(self, name: str) -> NodeThread:
        """End the node immediately, without a message to any peer."""
        node = self.nodes.pop(name)
        node.kill()
        self.dead.append(node)
        return node

    async def stop(self) -> None:
        try:
            for node in self.nodes.values():
                node.pauses.release_all()
            await self.quiescent()
        finally:
            await self.http.aclose()
            await self.service.stop()
            for name in list(self.nodes):
                self.kill(name)
        for node in self.dead:
            if node.error is not None:
                raise node.error
        for context in {self.context, self.node_context}:
            context.check_invariants()
            assert context.open_sockets() == ()
            context.close()

    async def quiescent(self) -> None:
        """Wait until nothing is in flight anywhere, then check every invariant."""
        await eventually(lambda: self.service.core.is_quiescent(), "the router worker is quiescent")
        self.service.core.check_invariants()
        for node in self.nodes.values():
            await self.until(node, lambda core: core.is_quiescent(), "is quiescent")
            await node.ask(lambda core: core.check_invariants())

    async def until(self, node: NodeThread, condition: Callable[[NodeCore], bool], what: str) -> None:
        """Wait until a condition of a node's core holds."""
        give_up_at = self.clock.now() + PATIENCE_S
        while not await node.ask(condition):
            if self.clock.now() > give_up_at:
                story = await node.ask(_story)
                raise AssertionError(f"did not happen within {PATIENCE_S} s: {node.name} {what}: {story}")
            await asyncio.sleep(POLL_S)

    def _settings(self, name: str, role: NodeKind, bind: str | None) -> NodeSettings:
        options = self.options
        address = {
            "inproc": f"inproc://{{}}-{self._number}-{name}-{len(self.dead)}",
            "ipc": f"ipc://{self._run_dir}/{{}}-{name}-{len(self.dead)}",
            "tcp": "tcp://127.0.0.1:*",
        }[options.scheme]
        per_token = bytes_per_token(self.loaded.kv_specs, self.loaded.config.num_layers)
        return NodeSettings(
            role=role,
            name=name,
            bind=bind or address.format("control"),
            kv_bind=address.format("kv"),
            advertise="",
            kv_advertise="",
            allow_remote=False,
            device="cpu",
            max_model_len=self.loaded.info.max_model_len,
            block_size=options.block_size,
            device_index=0,
            kv_cache_bytes=per_token * options.block_size * options.num_blocks,
            kv_cache_bytes_on_cpu=0,
            model_memory_bytes=None,
            tensor_parallel=1,
            device_reserve_share=0.1,
            swap_bytes=per_token * options.block_size * (options.num_host_blocks if role == "decode" else 0),
            max_swap_bytes=0,
            threads=1,
            max_step_tokens=options.max_step_tokens,
            max_running=options.max_running,
            steps_in_flight=options.steps_in_flight,
            graph_batch_sizes=() if role == "prefill" else options.graph_batch_sizes,
            prefix_cache=options.prefix_cache,
            checksum=options.checksum,
            kv_transports=options.kv_transports,
            staging_slots=6,
            staging_slot_bytes=65536,
        )

    # -- what a client does

    async def infer(self, token_ids: list[int], **parameters: Any) -> dict[str, Any]:
        """The unary answer: status, and the JSON body."""
        status, text = await self.post(body_of(token_ids, **parameters))
        return {"status": status, **json.loads(text)}

    async def post(self, body: bytes, **headers: str) -> tuple[int, str]:
        """Status and text of a token request. The client stays until the answer is complete."""
        response = await self.http.post(f"/v2/models/{MODEL}/infer", content=body, headers=headers)
        return response.status_code, response.text

    async def generate(self, token_ids: list[int], **parameters: Any) -> list[int]:
        """The output ids of a unary request that must succeed."""
        answer = await self.infer(token_ids, **parameters)
        assert answer["status"] == 200, answer
        data: list[int] = answer["outputs"][0]["data"]
        return data

    async def stream(self, token_ids: list[int], **parameters: Any) -> list[dict[str, Any]]:
        """All events of a streamed request."""
        status, text = await self.post(body_of(token_ids, **parameters), Accept="text/event-stream")
        assert status == 200, text
        return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    """The ids of a stream; checks that indices come once each, in order."""
    ids: list[int] = []
    for event in events:
        if event.get("token_ids"):
            assert event["index"] == len(ids), events
            ids += event["token_ids"]
    return ids


def _story(core: NodeCore) -> str:
    roles = [getattr(role, "jobs", None) or getattr(role, "entries", None) for role in core.roles]
    return f"roles {roles}, scheduler {core.scheduler.load()}"


@contextlib.asynccontextmanager
async def running_cluster(
    loaded: LoadedModel, device: Device, run_dir: str, options: ClusterOptions | None = None
) -> AsyncIterator[Cluster]:
    """A cluster that is ready; torn down, and checked for leaks, at the end."""
    large_frame_sent()
    fds, threads = num_fds(), threading.active_count()
    cluster = Cluster(loaded, device, options or ClusterOptions(), run_dir)
    await cluster.start()
    try:
        yield cluster
    except BaseException:
        with contextlib.suppress(BaseException):
            await cluster.stop()
        raise
    await cluster.stop()
    await eventually(lambda: num_fds() <= fds and threading.active_count() <= threads, "descriptors and threads")
