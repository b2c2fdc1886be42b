"""From a cluster's configuration to one node's own settings: role over [node], worked-out values filled in. Pure."""

from dataclasses import dataclass

from kvferry.common.config.host import HostFacts
from kvferry.common.config.schema import ClusterConfig, DeviceName, KvTransportName, NodeKind

_KV_CACHE_MOST_BYTES = 1 << 30
_KV_CACHE_LEAST_BYTES = 64 << 20
_KV_CACHE_SHARE = 0.1
_SWAP_MOST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What one node runs with. The keys are those of [node], [prefill], [decode] and [colocated]."""

    role: NodeKind
    name: str
    """Empty: the node makes one of its role, host and process id."""
    bind: str
    kv_bind: str
    advertise: str
    kv_advertise: str
    allow_remote: bool
    device: DeviceName
    max_model_len: int
    block_size: int
    device_index: int
    kv_cache_bytes: int | None
    """As configured; None: kv_cache_bytes_on_cpu on a CPU, elsewhere what is left after the weights."""
    kv_cache_bytes_on_cpu: int
    model_memory_bytes: int | None
    """None: as much as is free."""
    tensor_parallel: int
    device_reserve_share: float
    swap_bytes: int | None
    """As configured, 0 where nothing decodes; None: 0 on a CPU, elsewhere a tenth of the KV cache."""
    swap_bytes_most: int
    """Bound of what is worked out."""
    threads: int
    """Of each rank."""
    max_step_tokens: int
    max_running: int
    steps_in_flight: int | None
    """As configured; None: by the device."""
    graph_batches: tuple[int, ...]
    """None above max_running; empty where nothing decodes."""
    prefix_cache: bool
    checksum: bool
    kv_transports: tuple[KvTransportName, ...]
    staging_slots: int
    staging_slot_bytes: int


def resolve_node(config: ClusterConfig, role: NodeKind, host: HostFacts) -> NodeSettings:
    """One role's settings on a host."""
    node, own = config.node, config.role(role)
    nodes = nodes_on_host(config)
    max_step_tokens = own.max_step_tokens or node.max_step_tokens
    max_running = min(own.max_running or node.max_running, max_step_tokens)
    return NodeSettings(
        role=role,
        name=own.name,
        bind=own.bind,
        kv_bind=own.kv_bind,
        advertise=own.advertise,
        kv_advertise=own.kv_advertise,
        allow_remote=node.allow_remote,
        device=own.device or config.model.device,
        device_index=own.device_index,
        max_model_len=node.max_model_len,
        block_size=node.block_size,
        kv_cache_bytes=own.kv_cache_bytes or node.kv_cache_bytes,
        kv_cache_bytes_on_cpu=default_kv_cache_bytes(host.free_memory_bytes, nodes),
        model_memory_bytes=node.model_memory_bytes,
        tensor_parallel=node.tensor_parallel,
        threads=max(1, (own.threads or node.threads or host.cores // nodes) // node.tensor_parallel),
        device_reserve_share=node.device_reserve_share,
        swap_bytes=0 if role == "prefill" else node.swap_bytes,
        swap_bytes_most=int(host.free_memory_bytes * _SWAP_MOST_SHARE) // nodes,
        max_step_tokens=max_step_tokens,
        max_running=max_running,
        steps_in_flight=node.steps_in_flight,
        graph_batches=() if role == "prefill" else _graph_batches(node.graph_batches, max_running),
        prefix_cache=node.prefix_cache,
        checksum=node.checksum,
        kv_transports=node.kv_transports,
        staging_slots=node.staging_slots,
        staging_slot_bytes=node.staging_slot_bytes,
    )


def _graph_batches(configured: tuple[int, ...] | None, max_running: int) -> tuple[int, ...]:
    if configured is not None:
        return tuple(number for number in configured if number <= max_running)
    powers = (1 << exponent for exponent in range(max_running.bit_length()))
    return tuple(sorted({*powers, max_running}))


def nodes_on_host(config: ClusterConfig) -> int:
    """How many nodes share a host."""
    return config.node.nodes_on_host or sum(node_counts(config).values())


def node_counts(config: ClusterConfig) -> dict[NodeKind, int]:
    """How many nodes of each role `kvferry serve` starts, in the order of their start."""
    serve = config.serve
    split = 0 if serve.colocated else 1
    return {
        "prefill": split if serve.prefill is None else serve.prefill,
        "decode": split if serve.decode is None else serve.decode,
        "colocated": serve.colocated,
    }


def share_model_memory(config: ClusterConfig, host: HostFacts) -> int:
    """What each node of `kvferry serve` may take beside its cache: what is free without all caches, in equal parts."""
    counts = node_counts(config)
    caches = sum(_kv_cache_bytes(config, role, host) * number for role, number in counts.items())
    return max(1, (host.free_memory_bytes - caches) // sum(counts.values()))


def _kv_cache_bytes(config: ClusterConfig, role: NodeKind, host: HostFacts) -> int:
    node = resolve_node(config, role, host)
    return node.kv_cache_bytes or node.kv_cache_bytes_on_cpu


def default_kv_cache_bytes(free_memory_bytes: int, nodes: int) -> int:
    """A node's share of a tenth of the free memory, between 64 MiB and 1 GiB."""
    share = int(free_memory_bytes * _KV_CACHE_SHARE) // nodes
    return max(_KV_CACHE_LEAST_BYTES, min(_KV_CACHE_MOST_BYTES, share))
