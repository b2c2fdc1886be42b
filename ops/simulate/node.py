"""A node of the simulated world: the real cores, and a simulated engine, cache and KV transport. No decisions."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import (
    Action,
    CloseKv,
    CloseSession,
    ExitProcess,
    ExpectPieces,
    ForgetPieces,
    OpenKv,
    RunStep,
    SendPiece,
    StopPieces,
)
from kvferry.common.cluster.clients import ClientTable
from kvferry.common.cluster.events import DrainRequested, Event
from kvferry.common.cluster.node_core import NodeIdentity, make_node_core
from kvferry.common.cluster.node_role import RoleContext
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.kv.host_pool import HostPool
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.messages import PROTOCOL_VERSION, RoleName
from kvferry.common.protocol.model_info import Compatibility, ModelInfo
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SchedulerConfig
from kvferry.ops.roles import roles_maker
from kvferry.ops.simulate.clock import EventLoop
from kvferry.ops.simulate.costs import CostModel
from kvferry.ops.simulate.engine import SimEngine
from kvferry.ops.simulate.kv_link import KvSender
from kvferry.ops.simulate.kv_network import KvNetwork
from kvferry.ops.simulate.kv_receiver import KvReceiver
from kvferry.ops.simulate.kv_store import KvStore
from kvferry.ops.simulate.model import EOS_TOKEN_ID, USUAL_DTYPE, USUAL_WEIGHTS, VOCAB_SIZE, weights_number
from kvferry.ops.simulate.network import Network
from kvferry.ops.simulate.process import Process

MODEL_NAME = "sim"
STAGING_HOST = "sim-staging://"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What a node is; the same over all its lives."""

    name: str
    roles: tuple[RoleName, ...]
    model_name: str = MODEL_NAME
    weights: str = USUAL_WEIGHTS
    kv_dtype: str = USUAL_DTYPE
    num_blocks: int = 64
    num_host_blocks: int = 0
    block_size: int = 4
    num_layers: int = 2
    layer_token_bytes: int = 1024
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(eos_token_ids=frozenset({EOS_TOKEN_ID})))
    timers: Timers = field(default_factory=Timers)
    limits: Limits = field(default_factory=Limits)
    costs: CostModel = field(default_factory=CostModel)
    max_model_len: int = 4096
    check_kv: bool = True
    tick_s: float = 0.1
    staging_slots: int = 0
    """Slots that one-sided writes land in; none: everything goes in messages."""
    poisoned: frozenset[int] = frozenset()
    killers: frozenset[int] = frozenset()
    """See SimEngine; on nodes that decode."""

    @property
    def address(self) -> str:
        """Its control endpoint."""
        return f"sim://{self.name}"

    @property
    def kv_address(self) -> str:
        """Its KV endpoint."""
        return f"sim-kv://{self.name}"

    @property
    def weights_number(self) -> int:
        """What its tokens depend on besides ids, seed and position."""
        return weights_number(self.weights, self.kv_dtype)

    @property
    def compatibility(self) -> Compatibility:
        """What two nodes must agree on."""
        return Compatibility(
            protocol_version=PROTOCOL_VERSION,
            model=self.weights,
            kv_dtype=self.kv_dtype,
            kv_layout="sim",
            block_size=self.block_size,
            num_layers=self.num_layers,
        )

    @property
    def model(self) -> ModelInfo:
        """What it serves."""
        return ModelInfo(
            name=self.model_name,
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            max_position_embeddings=self.max_model_len,
            eos_token_ids=(EOS_TOKEN_ID,),
        )


class SimNode(Process):
    """One life of a node."""

    def __init__(self, loop: EventLoop, network: Network, kv: KvNetwork, spec: NodeSpec, life: Incarnation) -> None:
        super().__init__(loop, network, spec.name, life, spec.address, spec.tick_s)
        self.spec = spec
        self.exit_reason = ""
        self._wedged = False
        blocks = (spec.num_blocks, spec.num_host_blocks) if spec.check_kv else (0, 0)
        self.store = KvStore(spec.num_layers, blocks[0], spec.block_size, blocks[1])
        self.engine = SimEngine(
            loop, spec.costs, self.store, self.post, spec.name, poisoned=spec.poisoned, check_kv=spec.check_kv,
            weights=spec.weights_number,
        )  # fmt: skip
        if "decode" in spec.roles:
            self.engine.killers, self.engine.on_kill = spec.killers, self._killed
        self.killed_by: int | None = None
        """The seed of the request that ended it."""
        self.pool = BlockPool(spec.num_blocks, spec.block_size, MODEL_NAME)
        self.kv_sender = KvSender(kv, spec.name, spec.costs, self.store, self.post, self.when_awake, self.pool.is_held)
        self.kv_receiver = KvReceiver(loop, spec.name, life, self.store, self.post)
        self._kv = kv
        self.scheduler = Scheduler(spec.scheduler, self.pool, HostPool(spec.num_host_blocks))
        identity = NodeIdentity(
            life,
            spec.name,
            spec.model,
            spec.compatibility,
            (spec.kv_address,) if "decode" in spec.roles else (),
            ("sim",),
            (f"{STAGING_HOST}{spec.name}",) if "decode" in spec.roles and spec.staging_slots else (),
        )
        self.core = make_node_core(identity, self._context(), roles_maker(spec.roles))
        self._performers: dict[type, Callable[..., None]] = {
            RunStep: lambda action: self.engine.run(action.plan),
            SendPiece: lambda action: self.kv_sender.send(
                action.piece.key.decode, action.piece, action.block_table, action.slots
            ),
            StopPieces: lambda action: self.kv_sender.stop(action.key),
            OpenKv: lambda action: self.kv_sender.open(action.peer, *action.endpoints),
            CloseKv: lambda action: self.kv_sender.close(action.peer),
            ExpectPieces: lambda action: self.kv_receiver.expect(
                action.key, action.block_table, action.first_token, action.slots
            ),
            ForgetPieces: lambda action: self.kv_receiver.forget(action.key),
            CloseSession: lambda action: self.kv_receiver.close_session(action.peer),
            ExitProcess: lambda action: self.end(action.reason),
        }
        network.listen(self)
        if "decode" in spec.roles:
            kv.receivers[spec.kv_address] = self.kv_receiver

    def _context(self) -> RoleContext:
        spec = self.spec
        return RoleContext(
            self_id=self.incarnation,
            name=spec.name,
            compatibility=spec.compatibility,
            scheduler=self.scheduler,
            timers=spec.timers,
            limits=spec.limits,
            shape=KvShape(spec.num_layers, spec.layer_token_bytes),
            clients=ClientTable(spec.timers),
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            num_staging_slots=spec.staging_slots,
            staging_host=STAGING_HOST if spec.staging_slots else "",
        )

    def react(self, event: Event, now: float) -> list[Action]:
        """See Process."""
        return self.core.handle(event, now)

    def perform_own(self, action: object) -> None:
        """See Process."""
        self._performers[type(action)](action)

    def check_invariants(self) -> None:
        """See Process; and the transport expects pieces of reservations only."""
        self.core.check_invariants()

    def drain(self) -> None:
        """SIGTERM."""
        self.post(DrainRequested())

    def end(self, why: str) -> None:
        """See Process."""
        if self.alive:
            self.exit_reason = why
            self.engine.stop()
            if self._kv.receivers.get(self.spec.kv_address) is self.kv_receiver:
                del self._kv.receivers[self.spec.kv_address]
        super().end(why)

    def _killed(self, seed: int) -> None:
        self.killed_by = seed
        self.end("killed by a request")

    def freeze(self) -> None:
        """See Process; the engine stands still too."""
        super().freeze()
        self.engine.stop()

    def thaw(self) -> None:
        """See Process."""
        if self.alive and self.frozen and not self._wedged:
            self.engine.resume()
        super().thaw()

    def wedge(self) -> None:
        """The engine makes no more steps; everything else continues."""
        self._wedged = True
        self.engine.stop()
