"""The configuration of a cluster: one frozen struct per section, a docstring per key. Plain data; no IO.

A key whose default is None is derived where it is used (`common.config.resolve`). `--print-config` and
`ops/docs/configuration.md` show the docstrings of the keys. `common.config.checks` checks keys against each other.
"""

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.transports import KV_TRANSPORTS

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
DEVICES = {
    "npu": "kvferry.common.device.npu",
    "cuda": "kvferry.common.device.cuda",
    "cpu": "kvferry.common.device.cpu",
}
"""Device name -> the module that defines its BACKEND (`common.device.select`); auto tries them in this order."""
if TYPE_CHECKING:
    DeviceName = str
else:
    DeviceName = Literal["auto", *sorted(DEVICES)]
NodeKind = Literal["prefill", "decode", "colocated"]
"""How a node is started. A colocated node has both roles of the protocol."""
NODE_KINDS: tuple[NodeKind, ...] = ("prefill", "decode", "colocated")
if TYPE_CHECKING:
    KvTransportName = str
else:
    KvTransportName = Literal[tuple(KV_TRANSPORTS)]  # a type checker accepts no computed Literal


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that the cluster serves."""

    path: str = ""
    """A HuggingFace model directory or a GGUF file. A relative path is relative to the configuration file. Empty: a
    small real model, downloaded on first use."""
    name: str = ""
    """The model's name in URLs; must not contain a slash. Empty: the name of the file or directory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights, activations and KV. auto: the checkpoint's own, bfloat16 for GGUF."""
    quantization: Literal["none", "int8", "int4", "int8_dynamic"] = "none"
    """Quantization of projections, experts and head: faster decoding and less memory, but other tokens. int8_dynamic
    also quantizes activations to 8 bits. Must be the same on all nodes of a cluster."""
    device: DeviceName = "auto"
    """Device of the nodes; a role may override it. auto: the first available of npu, cuda, cpu."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server: gunicorn, its workers, and the limits of requests."""

    host: str = "127.0.0.1"
    """Address to serve HTTP on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 1025
    """Port to serve HTTP on; 0 picks a free one."""
    workers: Positive = 2
    """Number of gunicorn workers. Each is an independent router."""
    max_input_length: Annotated[int, Meta(ge=1, le=1_048_576)] = 2048
    """Longest prompt in tokens. node.max_model_len - 1 and the model's own limit apply as well."""
    max_iter_times: Positive = 512
    """Most output tokens of a request, whatever its max_new_tokens."""
    max_body_bytes: Positive = 40_000_000
    """Largest request body; a larger one gets 413."""
    body_timeout_s: Seconds = 60.0
    """A request whose body is incomplete after this time gets 408. The HTTP server (uvicorn) has no such timeout for
    request headers: if clients are not trusted, put a reverse proxy with one in front."""
    backlog: Positive = 2048
    """Length of the kernel's queue of connections that wait for a worker."""
    nodes: tuple[str, ...] = ()
    """Control endpoints of statically configured nodes, in addition to those that announce themselves."""


class DiscoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How routers discover nodes: nodes announce themselves to a proxy on each router host, which informs its workers.

    By default `kvferry serve` uses sockets in its run directory instead, so that two clusters on one machine stay
    separate. If any of these keys differs from its default, it uses them all."""

    announce_to: tuple[str, ...] = ("tcp://127.0.0.1:1035",)
    """Endpoints that nodes announce themselves to: the proxy of each router host. A host name stands for all its
    addresses and is resolved again every timers.resolve_s. Empty: only router.nodes are used."""
    proxy_nodes: str = "tcp://127.0.0.1:1035"
    """Endpoint that this host's proxy binds for nodes. Empty: this host runs no proxy."""
    proxy_workers: str = "tcp://127.0.0.1:1036"
    """Endpoint that this host's proxy binds for router workers, and that they connect to."""
    allow_remote: bool = False
    """Permit the proxy to bind beyond loopback without keys."""


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys for all tcp and ipc sockets; see ops/docs/security.md. Without keys everything binds loopback only. Paths
    are relative to the configuration file."""

    allowed_keys: str = ""
    """Public keys of the peers that this host's processes accept and connect to: a directory of .pub files, or a file
    with one key per line. Read again when it changes. Required if a key file is set."""
    node_key_file: str = ""
    """File with the secret key of this host's nodes; not needed on a host without nodes."""
    router_key_file: str = ""
    """File with the secret key of this host's router workers and proxy; not needed on a host without them."""
    kv: Literal["on", "off"] = "on"
    """off: KV is transferred without keys, for a network that encrypts by itself (WireGuard). Must be the same on all
    nodes; a kv_bind beyond loopback then needs node.allow_remote."""

    @property
    def is_on(self) -> bool:
        return bool(self.allowed_keys or self.node_key_file or self.router_key_file)


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of all nodes. [prefill], [decode] and [colocated] may override some of them for one role."""

    max_model_len: Annotated[int, Meta(ge=2)] = 2560
    """Most tokens of one request, prompt and output together. Reduced to the model's own limit if that is lower."""
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens per block of KV cache. Must be the same on all nodes."""
    kv_cache_bytes: Positive | None = None
    """Size of a node's KV cache, summed over its ranks. Derived on a CPU: a tenth of the free memory, divided by the
    host's nodes, from 64 MiB to 1 GiB. Derived on other devices: what the weights and device_reserve_share leave."""
    model_memory_bytes: Positive | None = None
    """Most memory that a node on a CPU may use besides its KV cache. A model that needs more is refused before it is
    loaded. Derived by kvferry serve: the memory that is free at its start minus the KV caches, divided by its nodes.
    In any case a node that needs more than the free memory is refused."""
    device_reserve_share: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """Share of an accelerator's memory left after the weights that the KV cache does not use. It is for the activations
    and logits of a step, for buffers of kernels and libraries, and for fragmentation, which grow with max_step_tokens
    and the vocabulary. A node that runs out of it exits. No effect on a CPU or with kv_cache_bytes."""
    swap_bytes: Annotated[int, Meta(ge=0)] | None = None
    """Host memory of a decoding node, summed over its ranks, for swapping out the KV of requests that must make room
    for others. 0: such requests are preempted instead, so the router places them again and they are recomputed. Derived
    on a CPU: 0, because a larger KV cache in the same memory is worth more. Derived on other devices: a tenth of the KV
    cache, but at most a quarter of the host's free memory divided by its nodes."""
    threads: Positive | None = None
    """Compute threads of a node. Derived: the host's cores divided by nodes_on_host, at least 1."""
    nodes_on_host: Positive | None = None
    """Number of nodes that share a host. Derived: serve.prefill + serve.decode + serve.colocated. Set it to 1 if each
    node has a host to itself."""
    tensor_parallel: Positive = 1
    """Number of processes (ranks) that a node's model is split over. Each has its own device; the ranks of a CPU node
    share its threads. Must be the same on all nodes and divide the model's heads, key-value heads and MLP sizes."""
    max_step_tokens: Positive = 512
    """Most tokens computed in one step, prefill chunks and decode tokens together. Longer prompts are split into
    chunks."""
    max_running: Positive = 128
    """Most requests that a node computes concurrently. Reduced to max_step_tokens if that is lower."""
    steps_in_flight: Annotated[int, Meta(ge=1, le=2)] | None = None
    """Number of steps submitted to the engine at a time. With 2 the next step is scheduled while one is computed, so
    the engine never waits for the node's other work, but a new request waits one step longer. Derived: 1 on a CPU, 2 on
    other devices."""
    graph_batch_sizes: tuple[Positive, ...] | None = None
    """Batch sizes for which a decode-only step is recorded at start (CUDA graphs, or the NPU's) and replayed as a
    whole; a batch is padded to the next size. Other steps launch each kernel separately. Derived: powers of two up to
    max_running, and max_running. Empty: no recording. No effect on a CPU, on prefill nodes, with tensor_parallel above
    1, and for models with experts."""
    share_weights: bool = True
    """Store packed weights in the user's cache directory, so that all nodes of a host map the same memory and the next
    start is faster. The files of the four most recent models are kept. Applies to CPUs with native ops, models of 64
    MiB or more, and weights that are not quantized."""
    prefix_cache: bool = True
    """Reuse the KV blocks of finished requests for prompts with the same prefix."""
    checksum: bool = True
    """Verify every transferred piece of KV with a checksum."""
    kv_transports: tuple[KvTransportName, ...] = ("shm", "zmq")
    """Permitted transports of KV. shm: shared memory, if both nodes run on one host under one user and tensor_parallel
    is 1. zmq: ZeroMQ, for everything else; it must be in the list."""
    staging_slots: Positive = 32
    """Most pieces of KV that a decode node receives through shared memory at a time; further ones use ZeroMQ."""
    staging_slot_bytes: Positive = 4_194_304
    """Largest piece of KV that is sent through shared memory."""
    allow_remote: bool = False
    """Permit nodes to bind beyond loopback without keys."""


class RoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the nodes of one role. A key that is not set has the value of [node] or [model]."""

    name: str = ""
    """The node's name in responses and logs. Empty: role, host name and process id. `kvferry serve` names its nodes
    itself, for example prefill-0."""
    bind: str = "tcp://127.0.0.1:*"
    """Control endpoint to bind; port * picks a free one."""
    kv_bind: str = "tcp://127.0.0.1:*"
    """KV endpoint to bind; control and KV never share a connection. Rank i of a tensor-parallel node binds this port
    plus i."""
    advertise: str = ""
    """Control endpoint that peers connect to. Empty: the bound one. Required if bind is a wildcard address. Port * is
    replaced by the bound port."""
    kv_advertise: str = ""
    """KV endpoint that peers connect to; see advertise."""
    device: DeviceName | None = None
    """Overrides model.device."""
    device_index: Annotated[int, Meta(ge=0)] = 0
    """Index of the accelerator to use. Rank i of a tensor-parallel node uses this index plus i."""
    kv_cache_bytes: Positive | None = None
    """Overrides node.kv_cache_bytes."""
    threads: Positive | None = None
    """Overrides node.threads."""
    max_step_tokens: Positive | None = None
    """Overrides node.max_step_tokens."""
    max_running: Positive | None = None
    """Overrides node.max_running."""


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs, which all processes write to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written."""
    format: Literal["human", "json"] = "human"
    """human: text lines. json: one JSON object per line."""
    access_log: bool = True
    """Write one line per HTTP request. Health checks and scrapes of metrics appear at level debug only."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kvferry serve`: a whole cluster on one machine."""

    prefill: NonNegative | None = None
    """Number of prefill nodes. Derived: 1, or 0 if serve.colocated is above 0."""
    decode: NonNegative | None = None
    """Number of decode nodes. Derived: 1, or 0 if serve.colocated is above 0."""
    colocated: NonNegative = 0
    """Number of nodes that both compute prompts and generate tokens, without a KV transfer between them."""
    stop_timeout_s: Seconds = 30.0
    """How long a graceful stop lets requests finish, for each stage: router, then prefill, then decode. Caps
    timers.worker_drain_s and timers.node_drain_s."""
    restart_min_s: Seconds = 0.5
    """Delay before a child process that died is restarted for the first time; it doubles with each quick death."""
    restart_max_s: Seconds = 10.0
    """Longest delay before a restart."""
    healthy_after_s: Seconds = 10.0
    """After a child has run for this long, the next restart uses the shortest delay again."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of a cluster, usually one TOML file."""

    model: ModelConfig = ModelConfig()
    router: RouterConfig = RouterConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    security: SecurityConfig = SecurityConfig()
    node: NodeConfig = NodeConfig()
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()
    colocated: RoleConfig = RoleConfig()
    log: LogConfig = LogConfig()
    serve: ServeConfig = ServeConfig()
    timers: Timers = Timers()
    limits: Limits = Limits()

    def role(self, role: NodeKind) -> RoleConfig:
        return {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}[role]


def section_types() -> dict[str, type[msgspec.Struct]]:
    """Section name -> its struct, in the order of the documentation."""
    return {field.name: type(field.default) for field in msgspec.structs.fields(ClusterConfig)}
