"""Which decode steps a node records, and the memory that takes: known before the KV cache, which takes what is left.

Composes; what is recorded and how is in `common.engine.decode_graphs`.
"""

import logging
from dataclasses import dataclass

from kvferry.common.config.resolve import NodeSettings
from kvferry.common.device.base import Device
from kvferry.common.engine.decode_graphs import DecodeGraphs, GraphSize, graph_sizes, num_scratch_blocks
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.models.load import LoadedModel

_LOG = logging.getLogger("kvferry.engine")


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What will be recorded."""

    sizes: tuple[GraphSize, ...] = ()
    """Empty: nothing."""
    num_scratch_blocks: int = 0
    """That the cache must have beside its own."""
    num_bytes: int = 0
    """Of the device, beside the cache; 0 where the cache does not take what is left anyway."""


def plan_graphs(settings: NodeSettings, loaded: LoadedModel, device: Device) -> GraphPlan:
    """Measured on the device where the cache's size depends on it."""
    graphs = device.graphs()
    # Ranks would have to record in step with one another. Experts are computed one by one: the host must know which.
    if graphs is None or settings.tensor_parallel > 1 or loaded.config.moe is not None:
        return GraphPlan()
    block_size = device.supported_block_size(settings.block_size)
    max_blocks = -(-loaded.info.max_model_len // block_size)
    sizes = graph_sizes(settings.graph_batch_sizes, max_blocks, block_size, graphs.most_tokens)
    plan = GraphPlan(sizes, num_scratch_blocks(sizes, block_size))
    if not sizes or settings.kv_cache_bytes is not None:
        return plan
    # A cache of hardly more than scratch blocks, since the real one is not there yet.
    trial = KvCache(device, loaded.kv_specs, loaded.config.num_layers, 1, block_size, plan.num_scratch_blocks)
    try:
        num_bytes = DecodeGraphs(loaded.model, trial, device, graphs, sizes).measure()
    except RuntimeError as error:
        _LOG.warning("decode steps are not recorded: %s", error)
        return GraphPlan()
    return GraphPlan(sizes, plan.num_scratch_blocks, num_bytes)


def record_graphs(plan: GraphPlan, loaded: LoadedModel, cache: KvCache, device: Device) -> DecodeGraphs | None:
    """Over the node's own cache; None where nothing is to be recorded."""
    graphs = device.graphs()
    if graphs is None or not plan.sizes:
        return None
    recorded = DecodeGraphs(loaded.model, cache, device, graphs, plan.sizes)
    recorded.record()
    return recorded
