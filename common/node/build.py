"""From a loaded model and settings to the parts of a node. Composes; decides nothing and does no IO by itself."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry.common.base.clock import Clock
from kvferry.common.base.errors import ConfigError
from kvferry.common.base.ids import (
    Incarnation,
    new_incarnation,
)
from kvferry.common.cluster.clients import ClientTable
from kvferry.common.cluster.events import Event
from kvferry.common.cluster.node_core import (
    NodeCore,
    NodeIdentity,
)
from kvferry.common.cluster.node_role import NodeRole
from kvferry.common.config.endpoints import endpoint_of_rank, parse_endpoint, with_key
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.device.base import Device
from kvferry.common.engine.engine_thread import (
    EngineThread,
    StepRunner,
)
from kvferry.common.engine.host_cache import HostCache
from kvferry.common.engine.kv_cache import KvCache, bytes_per_token, num_blocks_for
from kvferry.common.engine.runner import ModelRunner
from kvferry.common.engine.sampler import Sampler
from kvferry.common.engine.staging import Landing
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.kv.host_pool import HostPool
from kvferry.common.kv.shape import KvShape
from kvferry.common.kv_transfer.build import make_mover
from kvferry.common.kv_transfer.interface import KvMover
from kvferry.common.kv_transfer.registry import num_staging_slots, staging_host, usable_transports
from kvferry.common.models.load import LoadedModel
from kvferry.common.node.graphs import GraphPlan, plan_graphs, record_graphs
from kvferry.common.node.memory import (
    check_piece_bytes,
    kv_cache_bytes,
    swap_bytes,
)
from kvferry.common.node.shell import NodeParts, NodeShell
from kvferry.common.parallel.collectives import ALONE
from kvferry.common.protocol.messages import PROTOCOL_VERSION
from kvferry.common.protocol.model_info import (
    Compatibility,
    ModelInfo,
)
from kvferry.common.ranks.kv import RankedKvMover
from kvferry.common.ranks.runner import LeadRunner
from kvferry.common.ranks.team import RankTeam
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SchedulerConfig
from kvferry.common.transport.context import TransportContext


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What a role is made of, beside its own tables."""

    incarnation: Incarnation
    name: str
    scheduler: Scheduler
    timers: Timers
    limits: Limits
    shape: KvShape
    compatibility: Compatibility
    num_blocks: int
    block_size: int
    num_staging_slots: int
    """Slots of this node that one-sided transports may write into."""
    staging_host: str
    """What the places of other nodes' slots begin with that can be written from here; empty: none can."""
    clients: Callable[[], ClientTable]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a node shares with its process, or with a test."""

    context: TransportContext
    clock: Clock
    log: logging.Logger
    timers: Timers
    limits: Limits
    wrap_runner: Callable[[StepRunner], StepRunner] = lambda runner: runner
    """For tests that stop the engine at chosen points."""


MakeLegs = Callable[[RoleContext], Sequence[NodeRole]]


class NodeBuilder:
    """Makes one node's shell out of a loaded model."""

    def __init__(
        self,
        loaded: LoadedModel,
        device: Device,
        settings: NodeSettings,
        around: Surroundings,
        make_roles: MakeLegs,
        team: RankTeam | None = None,
    ) -> None:
        """`loaded` is rank 0's part of the model where there is a `team` of other ranks, which have been started."""
        self._team = team
        self._loaded = loaded
        self._device = device
        self._settings = settings
        self._around = around
        self._make_legs = make_roles
        self.incarnation = new_incarnation()
        self._cache: KvCache | None = None

    def build(self) -> NodeShell:
        """Allocate the KV cache and put the shell together; with a team, wait until all ranks have done so.

        ConfigError when not even one request, or one token in a piece, would fit; RankLostError when a rank is gone.
        """
        settings, around = self._settings, self._around
        plan = plan_graphs(settings, self._loaded, self._device)
        self._cache = cache = self._allocate(plan)
        pool = BlockPool(
            cache.num_blocks, cache.block_size, self._loaded.identity, prefix_caching=settings.prefix_cache
        )
        num_host_blocks = num_blocks_for(
            swap_bytes(settings, self._device, cache.num_bytes), cache.specs, cache.num_layers, cache.block_size
        )
        scheduler = Scheduler(self._scheduler_config(), pool, HostPool(num_host_blocks))
        sampler = Sampler(self._loaded.info.vocab_size, Landing(self._device).fetch)
        host_cache = HostCache(self._device, cache, num_host_blocks)
        collectives = ALONE if self._team is None else self._team.collectives
        graphs = record_graphs(plan, self._loaded, cache, self._device)
        own = ModelRunner(self._loaded.model, cache, sampler, self._device, host_cache, collectives, graphs)
        runner = around.wrap_runner(self._led(own))
        if self._team is not None:
            self._team.begin(self.incarnation, cache.num_blocks, self._device, num_host_blocks)
        holder: list[NodeShell] = []
        parts = NodeParts(
            incarnation=self.incarnation,
            context=around.context,
            bind=settings.bind,
            allow_remote=settings.allow_remote,
            make_core=lambda: self._core(scheduler, holder[0]),
            engine=lambda post: EngineThread(runner, self._device.activate_thread, post, around.log),
            kv=self._mover,
            limits=around.limits,
            timers=around.timers,
            clock=around.clock,
            log=around.log,
        )
        holder.append(NodeShell(parts))
        return holder[0]

    @property
    def model_info(self) -> ModelInfo:
        """The model's limits, cut to this node's settings."""
        return self._loaded.info

    def _led(self, runner: ModelRunner) -> StepRunner:
        return runner if self._team is None else LeadRunner(runner, self._team.pass_on)

    def _mover(self, post: Callable[[Event], None]) -> KvMover:
        assert self._cache is not None
        around = self._around
        make_own = partial(
            make_mover,
            around.context,
            self.incarnation,
            self._settings.kv_bind,
            self._cache,
            self._settings,
            around.limits,
            around.timers,
            self._device.activate_thread,
        )
        return make_own(post) if self._team is None else RankedKvMover(self._team, make_own, post)

    def _allocate(self, plan: GraphPlan) -> KvCache:
        settings, specs = self._settings, self._loaded.kv_specs
        layers = self._loaded.config.num_layers
        block_size = self._device.supported_block_size(settings.block_size)
        free_bytes = self._device.memory_info()[0]
        if self._team is not None:
            free_bytes = min(free_bytes, self._team.wait_loaded())
        of_rank = kv_cache_bytes(settings, self._device, free_bytes - plan.num_bytes)
        num_bytes = of_rank * settings.tensor_parallel
        num_blocks = num_blocks_for(of_rank, specs, layers, block_size) - plan.num_scratch_blocks
        check_piece_bytes(self._around.limits, bytes_per_token(specs, 1))
        needed = -(-self._loaded.info.max_model_len // block_size) + 1
        if num_blocks < needed:
            raise ConfigError(
                f"node.kv_cache_bytes: {num_bytes} bytes are {num_blocks} blocks of {block_size} tokens, but one "
                f"request of node.max_model_len {self._loaded.info.max_model_len} tokens needs {needed}"
            )
        return KvCache(self._device, specs, layers, num_blocks, block_size, plan.num_scratch_blocks)

    def _scheduler_config(self) -> SchedulerConfig:
        timers, limits, settings = self._around.timers, self._around.limits, self._settings
        return SchedulerConfig(
            eos_token_ids=frozenset(self._loaded.info.eos_token_ids),
            vocab_size=self._loaded.info.vocab_size,
            max_step_tokens=settings.max_step_tokens,
            max_running=settings.max_running,
            max_steps_in_flight=settings.steps_in_flight or (1 if self._device.name == "cpu" else 2),
            aging_s=timers.aging_s,
            max_preempt=limits.max_preempt,
            swap_wait_s=timers.swap_wait_s,
            reserved_share=limits.reserved_share,
            watermark_blocks_share=limits.watermark_blocks_share,
        )

    def _compatibility(self, cache: KvCache) -> Compatibility:
        size = self._settings.tensor_parallel
        tensors = ",".join(f"{spec.name}{list(spec.whole_shape(size))}" for spec in cache.specs)
        return Compatibility(
            protocol_version=PROTOCOL_VERSION,
            model=self._loaded.identity,
            kv_dtype=str(cache.specs[0].dtype).removeprefix("torch."),
            kv_layout=tensors.replace(" ", ""),
            block_size=cache.block_size,
            num_layers=cache.num_layers,
            tensor_parallel=size,
        )

    def _kv_endpoints(self, own: str) -> tuple[str, ...]:
        bound = (own, *(() if self._team is None else self._team.kv_endpoints))
        advertise = self._settings.kv_advertise
        return tuple(advertised(one, endpoint_of_rank(advertise, rank)) for rank, one in enumerate(bound))

    def _core(self, scheduler: Scheduler, shell: NodeShell) -> NodeCore:
        assert self._cache is not None
        cache, around, settings = self._cache, self._around, self._settings
        compatibility = self._compatibility(cache)
        identity = NodeIdentity(
            self.incarnation,
            settings.name,
            self._loaded.info,
            compatibility,
            kv_endpoints=self._kv_endpoints(shell.kv_endpoint),
            transports=tuple(transport.name for transport in usable_transports(settings)),
            staging=(shell.staging_address,) if shell.staging_address else (),
        )
        core: list[NodeCore] = []
        context = RoleContext(
            incarnation=self.incarnation,
            name=settings.name,
            scheduler=scheduler,
            timers=around.timers,
            limits=around.limits,
            shape=KvShape(cache.num_layers, cache.bytes_per_token // cache.num_layers),
            compatibility=compatibility,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            num_staging_slots=num_staging_slots(settings),
            staging_host=staging_host(settings),
            clients=lambda: core[0].clients,
        )
        core.append(NodeCore(identity, around.timers, scheduler, self._make_legs(context)))
        return core[0]


def advertised(bound: str, advertise: str) -> str:
    """How others reach a bound endpoint: as configured, a port of * standing for the bound one, and with its key."""
    if not advertise:
        return bound
    endpoint = parse_endpoint(bound)
    text = f"{advertise.removesuffix('*')}{endpoint.port}" if advertise.endswith(":*") else advertise
    return with_key(text, endpoint.key) if endpoint.key else text
