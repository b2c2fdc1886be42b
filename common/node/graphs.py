"""Which decode steps a node records, and how much memory that takes. Must precede the KV cache, which takes the rest.

Composition only; recording itself is in `common.engine.decode_graphs`.
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
    """The decode steps to record and the memory to leave for them."""

    sizes: tuple[GraphSize, ...] = ()
    """Empty: none."""
    num_scratch_blocks: int = 0
    """Extra blocks that the KV cache must have."""
    num_bytes: int = 0
    """Device memory to leave free; 0 if the KV cache has a configured size."""


def plan_graphs(settings: NodeSettings, loaded: LoadedModel, device: Device) -> GraphPlan:
    """Decide what to record. Measures on the device only if the size of the KV cache depends on the result."""
    graphs = device.graphs()
    # Not for several ranks, which would have to record in lockstep. Not for MoE: experts are computed one by one, so
    # the host must know which ones were chosen.
    if graphs is None or settings.tensor_parallel > 1 or loaded.config.moe is not None:
        return GraphPlan()
    block_size = device.supported_block_size(settings.block_size)
    max_blocks = -(-loaded.info.max_model_len // block_size)
    sizes = graph_sizes(settings.graph_batch_sizes, max_blocks, block_size, graphs.most_tokens)
    plan = GraphPlan(sizes, num_scratch_blocks(sizes, block_size))
    if not sizes or settings.kv_cache_bytes is not None:
        return plan
    # A minimal cache (one block and the scratch blocks), since the real one is not allocated yet.
    trial = KvCache(device, loaded.kv_specs, loaded.config.num_layers, 1, block_size, plan.num_scratch_blocks)
    try:
        num_bytes = DecodeGraphs(loaded.model, trial, device, graphs, sizes).measure()
    except RuntimeError as error:
        _LOG.warning("decode steps are not recorded: %s", error)
        return GraphPlan()
    return GraphPlan(sizes, plan.num_scratch_blocks, num_bytes)


def record_graphs(plan: GraphPlan, loaded: LoadedModel, cache: KvCache, device: Device) -> DecodeGraphs | None:
    """Record the planned steps over the node's KV cache; None if the plan is empty."""
    graphs = device.graphs()
    if graphs is None or not plan.sizes:
        return None
    recorded = DecodeGraphs(loaded.model, cache, device, graphs, plan.sizes)
    recorded.record()
    return recorded
