"""Composes a node from a loaded model and its settings. Decides nothing and does no IO of its own."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.common.base.clock import Clock
from kvferry.common.base.ids import new_incarnation
from kvferry.common.cluster.clients import ClientTable
from kvferry.common.cluster.events import Event
from kvferry.common.cluster.node_core import NodeCore, NodeIdentity, make_node_core
from kvferry.common.cluster.node_role import MakeRoles, RoleContext
from kvferry.common.config.endpoints import endpoint_of_rank
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.device.base import Device
from kvferry.common.engine.engine_thread import EngineThread, StepRunner
from kvferry.common.engine.host_cache import HostCache
from kvferry.common.engine.kv_cache import KvCache, bytes_per_token, num_blocks_for
from kvferry.common.engine.runner import ModelRunner
from kvferry.common.engine.sampler import Sampler
from kvferry.common.engine.step_buffers import OutputBuffer
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.kv.host_pool import HostPool
from kvferry.common.kv.shape import KvShape
from kvferry.common.kv_transfer.build import make_mover
from kvferry.common.kv_transfer.interface import KvMover
from kvferry.common.kv_transfer.registry import num_staging_slots, staging_host, usable_transports
from kvferry.common.models.load import LoadedModel
from kvferry.common.node.graphs import GraphPlan, plan_graphs, record_graphs
from kvferry.common.node.identity import advertised_endpoint, compatibility_of
from kvferry.common.node.memory import check_longest_request_fits, check_piece_bytes, kv_cache_bytes, swap_bytes
from kvferry.common.node.shell import NodeParts, NodeShell
from kvferry.common.parallel.collectives import ALONE
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.common.ranks.kv import RankedKvMover
from kvferry.common.ranks.runner import LeadRunner
from kvferry.common.ranks.team import RankTeam
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SchedulerConfig
from kvferry.common.transport.context import TransportContext


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """What a node shares with its process or with a test."""

    context: TransportContext
    clock: Clock
    log: logging.Logger
    timers: Timers
    limits: Limits
    wrap_runner: Callable[[StepRunner], StepRunner] = lambda runner: runner
    """For tests that pause the engine at chosen points."""


class NodeBuilder:
    """Builds one node's shell from a loaded model."""

    def __init__(
        self,
        loaded: LoadedModel,
        device: Device,
        settings: NodeSettings,
        environment: NodeEnvironment,
        make_roles: MakeRoles,
        team: RankTeam | None = None,
    ) -> None:
        """With a `team` of other ranks, which must be started, `loaded` is rank 0's part of the model."""
        self._loaded = loaded
        self._device = device
        self._settings = settings
        self._environment = environment
        self._make_roles = make_roles
        self._team = team
        self.incarnation = new_incarnation()

    @property
    def model_info(self) -> ModelInfo:
        """The model's limits, restricted to this node's settings."""
        return self._loaded.info

    def build(self) -> NodeShell:
        """Allocate the KV cache and compose the shell; with a team, wait until all ranks have allocated theirs.

        Raises ConfigError when the cache is too small for one request of node.max_model_len tokens or a piece for one
        token, RankLostError when a rank is lost.
        """
        settings, environment = self._settings, self._environment
        graph_plan = plan_graphs(settings, self._loaded, self._device)
        cache = self._allocate_cache(graph_plan)
        num_host_blocks = num_blocks_for(
            swap_bytes(settings, self._device, cache.num_bytes), cache.specs, cache.num_layers, cache.block_size
        )
        runner = environment.wrap_runner(self._make_runner(cache, num_host_blocks, graph_plan))
        if self._team is not None:
            self._team.initialize(self.incarnation, cache.num_blocks, self._device, num_host_blocks)
        parts = NodeParts(
            incarnation=self.incarnation,
            context=environment.context,
            bind=settings.bind,
            allow_remote=settings.allow_remote,
            make_core=partial(self._make_core, cache, self._make_scheduler(cache, num_host_blocks)),
            make_engine=lambda post: EngineThread(runner, self._device.activate_thread, post, environment.log),
            make_kv=partial(self._make_kv, cache),
            limits=environment.limits,
            timers=environment.timers,
            clock=environment.clock,
            log=environment.log,
        )
        return NodeShell(parts)

    # -- the parts

    def _allocate_cache(self, graph_plan: GraphPlan) -> KvCache:
        settings, loaded, device = self._settings, self._loaded, self._device
        specs, num_layers = loaded.kv_specs, loaded.config.num_layers
        block_size = device.supported_block_size(settings.block_size)
        free_bytes = device.memory_info()[0]
        if self._team is not None:
            free_bytes = min(free_bytes, self._team.wait_loaded())
        rank_bytes = kv_cache_bytes(settings, device, free_bytes - graph_plan.num_bytes)
        num_blocks = num_blocks_for(rank_bytes, specs, num_layers, block_size) - graph_plan.num_scratch_blocks
        check_piece_bytes(self._environment.limits, bytes_per_token(specs, 1))
        check_longest_request_fits(
            loaded.info.max_model_len, num_blocks, block_size, rank_bytes * settings.tensor_parallel
        )
        return KvCache(device, specs, num_layers, num_blocks, block_size, graph_plan.num_scratch_blocks)

    def _make_runner(self, cache: KvCache, num_host_blocks: int, graph_plan: GraphPlan) -> StepRunner:
        loaded, device, team = self._loaded, self._device, self._team
        runner = ModelRunner(
            loaded.model,
            cache,
            Sampler(loaded.info.vocab_size, OutputBuffer(device).fetch),
            device,
            HostCache(device, cache, num_host_blocks),
            ALONE if team is None else team.collectives,
            record_graphs(graph_plan, loaded, cache, device),
        )
        return runner if team is None else LeadRunner(runner, team.broadcast_step)

    def _make_kv(self, cache: KvCache, post: Callable[[Event], None]) -> KvMover:
        environment = self._environment
        make_local = partial(
            make_mover,
            environment.context,
            self.incarnation,
            self._settings.kv_bind,
            cache,
            self._settings,
            environment.limits,
            environment.timers,
            self._device.activate_thread,
        )
        return make_local(post) if self._team is None else RankedKvMover(self._team, make_local, post)

    def _make_scheduler(self, cache: KvCache, num_host_blocks: int) -> Scheduler:
        settings, info = self._settings, self._loaded.info
        timers, limits = self._environment.timers, self._environment.limits
        pool = BlockPool(
            cache.num_blocks, cache.block_size, self._loaded.identity, prefix_caching=settings.prefix_cache
        )
        config = SchedulerConfig(
            eos_token_ids=frozenset(info.eos_token_ids),
            vocab_size=info.vocab_size,
            max_step_tokens=settings.max_step_tokens,
            max_running=settings.max_running,
            max_steps_in_flight=settings.steps_in_flight or self._device.default_steps_in_flight,
            aging_s=timers.aging_s,
            max_preemptions=limits.max_preemptions,
            swap_wait_s=timers.swap_wait_s,
            reserved_share=limits.reserved_share,
            watermark_blocks_share=limits.watermark_blocks_share,
        )
        return Scheduler(config, pool, HostPool(num_host_blocks))

    def _make_core(self, cache: KvCache, scheduler: Scheduler, kv_endpoint: str, staging_address: str) -> NodeCore:
        environment, settings = self._environment, self._settings
        compatibility = compatibility_of(
            self._loaded.identity, self._loaded.weights_version, cache, settings.tensor_parallel
        )
        identity = NodeIdentity(
            self.incarnation,
            settings.name,
            self._loaded.info,
            compatibility,
            kv_endpoints=self._kv_endpoints(kv_endpoint),
            transports=tuple(transport.name for transport in usable_transports(settings)),
            staging=(staging_address,) if staging_address else (),
        )
        context = RoleContext(
            self_id=self.incarnation,
            name=settings.name,
            compatibility=compatibility,
            scheduler=scheduler,
            timers=environment.timers,
            limits=environment.limits,
            shape=KvShape(cache.num_layers, cache.bytes_per_token // cache.num_layers),
            clients=ClientTable(environment.timers),
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            num_staging_slots=num_staging_slots(settings),
            staging_host=staging_host(settings),
        )
        return make_node_core(identity, context, self._make_roles)

    def _kv_endpoints(self, rank_0: str) -> tuple[str, ...]:
        bound = (rank_0, *(() if self._team is None else self._team.kv_endpoints))
        advertise = self._settings.kv_advertise
        return tuple(advertised_endpoint(one, endpoint_of_rank(advertise, rank)) for rank, one in enumerate(bound))
