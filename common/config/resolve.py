"""Derives the settings of one node from the cluster's configuration: overrides of its role and unset values. Pure."""

from dataclasses import dataclass

from kvferry.common.config.host import HostFacts
from kvferry.common.config.schema import ClusterConfig, DeviceName, KvTransportName, NodeKind

_MAX_KV_CACHE_BYTES = 1 << 30
_MIN_KV_CACHE_BYTES = 64 << 20
_KV_CACHE_SHARE = 0.1
_MAX_SWAP_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The settings of one node. The names are the keys of [node], [prefill], [decode] and [colocated]."""

    role: NodeKind
    name: str
    """Empty: the node builds one from its role, host and process id."""
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
    """As configured. None: kv_cache_bytes_on_cpu on a CPU, elsewhere the memory that the weights leave."""
    kv_cache_bytes_on_cpu: int
    model_memory_bytes: int | None
    """None: the free memory."""
    tensor_parallel: int
    device_reserve_share: float
    swap_bytes: int | None
    """As configured, 0 on a prefill node. None: 0 on a CPU, elsewhere a tenth of the KV cache."""
    max_swap_bytes: int
    """Upper bound of a derived swap_bytes."""
    threads: int
    """Threads of each rank."""
    max_step_tokens: int
    max_running: int
    steps_in_flight: int | None
    """As configured. None: depends on the device."""
    graph_batch_sizes: tuple[int, ...]
    """At most max_running each; empty on a prefill node."""
    prefix_cache: bool
    checksum: bool
    kv_transports: tuple[KvTransportName, ...]
    staging_slots: int
    staging_slot_bytes: int


def resolve_node(config: ClusterConfig, role: NodeKind, host: HostFacts) -> NodeSettings:
    """The settings of a node of this role on this host."""
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
        max_swap_bytes=int(host.free_memory_bytes * _MAX_SWAP_SHARE) // nodes,
        max_step_tokens=max_step_tokens,
        max_running=max_running,
        steps_in_flight=node.steps_in_flight,
        graph_batch_sizes=() if role == "prefill" else _graph_batch_sizes(node.graph_batch_sizes, max_running),
        prefix_cache=node.prefix_cache,
        checksum=node.checksum,
        kv_transports=node.kv_transports,
        staging_slots=node.staging_slots,
        staging_slot_bytes=node.staging_slot_bytes,
    )


def _graph_batch_sizes(configured: tuple[int, ...] | None, max_running: int) -> tuple[int, ...]:
    if configured is not None:
        return tuple(number for number in configured if number <= max_running)
    powers = (1 << exponent for exponent in range(max_running.bit_length()))
    return tuple(sorted({*powers, max_running}))


def nodes_on_host(config: ClusterConfig) -> int:
    """Number of nodes that share a host."""
    return config.node.nodes_on_host or sum(node_counts(config).values())


def node_counts(config: ClusterConfig) -> dict[NodeKind, int]:
    """Number of nodes of each role that `kvferry serve` starts, in the order of their start."""
    serve = config.serve
    default = 0 if serve.colocated else 1
    return {
        "prefill": default if serve.prefill is None else serve.prefill,
        "decode": default if serve.decode is None else serve.decode,
        "colocated": serve.colocated,
    }


def share_model_memory(config: ClusterConfig, host: HostFacts) -> int:
    """Memory that each node of `kvferry serve` may use besides its KV cache: the free memory minus all caches, divided
    by the number of nodes."""
    counts = node_counts(config)
    caches = sum(_kv_cache_bytes(config, role, host) * number for role, number in counts.items())
    return max(1, (host.free_memory_bytes - caches) // sum(counts.values()))


def _kv_cache_bytes(config: ClusterConfig, role: NodeKind, host: HostFacts) -> int:
    node = resolve_node(config, role, host)
    return node.kv_cache_bytes or node.kv_cache_bytes_on_cpu


def default_kv_cache_bytes(free_memory_bytes: int, nodes: int) -> int:
    """A node's equal share of a tenth of the free memory, at least 64 MiB and at most 1 GiB."""
    share = int(free_memory_bytes * _KV_CACHE_SHARE) // nodes
    return max(_MIN_KV_CACHE_BYTES, min(_MAX_KV_CACHE_BYTES, share))
