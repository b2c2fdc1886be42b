"""A node of the simulated world: the real cores with a simulated engine, cache and KV transport. Decides nothing."""

from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
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
    """Configuration of a node, the same for all its incarnations."""

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
    """Number of slots for one-sided writes; 0: all pieces are sent in messages."""
    poisoned: frozenset[int] = frozenset()
    """See SimEngine."""
    killers: frozenset[int] = frozenset()
    """See SimEngine; takes effect on decode nodes only."""

    @property
    def address(self) -> str:
        """Control endpoint."""
        return f"sim://{self.name}"

    @property
    def kv_address(self) -> str:
        """KV endpoint."""
        return f"sim-kv://{self.name}"

    @property
    def weights_number(self) -> int:
        """The number that its tokens depend on in addition to ids, seed and position."""
        return weights_number(self.weights, self.kv_dtype)

    @property
    def compatibility(self) -> Compatibility:
        """The fields in which two nodes must agree."""
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
        """The model that it serves."""
        return ModelInfo(
            name=self.model_name,
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            max_position_embeddings=self.max_model_len,
            eos_token_ids=(EOS_TOKEN_ID,),
        )


class SimNode(Process):
    """One incarnation of a node."""

    def __init__(
        self, loop: EventLoop, network: Network, kv: KvNetwork, spec: NodeSpec, incarnation: Incarnation
    ) -> None:
        super().__init__(loop, network, spec.name, incarnation, spec.address, spec.tick_s)
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
        """Seed of the request that crashed it."""
        self.pool = BlockPool(spec.num_blocks, spec.block_size, MODEL_NAME)
        self.kv_sender = KvSender(kv, spec.name, spec.costs, self.store, self.post, self.when_awake, self.pool.is_held)
        self.kv_receiver = KvReceiver(loop, spec.name, incarnation, self.store, self.post)
        self._kv = kv
        self.scheduler = Scheduler(spec.scheduler, self.pool, HostPool(spec.num_host_blocks))
        identity = NodeIdentity(
            incarnation,
            spec.name,
            spec.model,
            spec.compatibility,
            (spec.kv_address,) if "decode" in spec.roles else (),
            ("sim",),
            (f"{STAGING_HOST}{spec.name}",) if "decode" in spec.roles and spec.staging_slots else (),
        )
        self.core = make_node_core(identity, self._context(), roles_maker(spec.roles))
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
        match action:
            case RunStep(batch):
                self.engine.run(batch)
            case SendPiece(piece, block_table, slots):
                self.kv_sender.send(piece.key.decode, piece, block_table, slots)
            case StopPieces(key):
                self.kv_sender.stop(key)
            case OpenKv(peer, endpoints):
                self.kv_sender.open(peer, *endpoints)
            case CloseKv(peer):
                self.kv_sender.close(peer)
            case ExpectPieces():
                self.kv_receiver.expect(action.key, action.block_table, action.first_token, action.slots)
            case ForgetPieces(key):
                self.kv_receiver.forget(key)
            case CloseSession(peer):
                self.kv_receiver.close_session(peer)
            case ExitProcess(reason):
                self.end(reason)
            case _:
                raise InvariantError(f"node {self.host} received an unknown action: {action!r}")

    def check_invariants(self) -> None:
        """See Process."""
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
        """See Process; stops the engine too."""
        super().freeze()
        self.engine.stop()

    def thaw(self) -> None:
        """See Process."""
        if self.alive and self.frozen and not self._wedged:
            self.engine.resume()
        super().thaw()

    def wedge(self) -> None:
        """Stop the engine for good; the rest of the process continues."""
        self._wedged = True
        self.engine.stop()
