"""The types of a cluster's configuration: one frozen struct per section, a docstring per key. Plain data; no IO.

Keys whose default is None are worked out where they are used (`common.config.resolve`). The texts below each key are
what `--print-config` and `ops/docs/configuration.md` show. Checks over several keys are in `common.config.checks`.
"""

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.transports import KV_TRANSPORTS

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
DeviceName = Literal["auto", "cpu", "cuda", "npu"]
NodeKind = Literal["prefill", "decode", "colocated"]
"""What a node is started as; a colocated node has both roles of the protocol."""
NODE_KINDS: tuple[NodeKind, ...] = ("prefill", "decode", "colocated")
if TYPE_CHECKING:
    KvTransportName = str
else:
    KvTransportName = Literal[tuple(KV_TRANSPORTS)]  # a type checker accepts no computed Literal


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model the cluster serves."""

    path: str = ""
    """A HuggingFace directory or a GGUF file. Relative paths are relative to the configuration file; empty means the
    small real model, which is fetched when it is needed."""
    name: str = ""
    """The name in URLs; no slash. Empty means the file's or directory's own name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights, computing and KV. auto is the checkpoint's own, bfloat16 for GGUF."""
    quantization: Literal["none", "int8", "int4", "int8_dynamic"] = "none"
    """Projections, experts and head in fewer bits: faster decoding and less memory, other tokens. int8_dynamic rounds
    activations to 8 bits as well. All nodes of a cluster must agree."""
    device: DeviceName = "auto"
    """Where nodes compute; a role may have its own. auto is the first there is of npu, cuda, cpu."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side: gunicorn, its workers, and the limits that requests are checked against."""

    host: str = "127.0.0.1"
    """Address that HTTP is served on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 1025
    """Port that HTTP is served on; 0 picks a free one."""
    workers: Positive = 2
    """gunicorn workers; each is a router of its own."""
    max_input_length: Annotated[int, Meta(ge=1, le=1_048_576)] = 2048
    """Longest prompt in tokens; node.max_model_len - 1 and the model's own limit hold as well."""
    max_iter_times: Positive = 512
    """Most output tokens of a request, whatever its max_new_tokens."""
    max_body_bytes: Positive = 40_000_000
    """Largest request body; beyond it 413."""
    body_timeout_s: Seconds = 60.0
    """A body that has not come whole after this time: 408. The head of a request is read by the HTTP server (uvicorn),
    which sets no such bound: where clients are not trusted, put a proxy that does so in front."""
    backlog: Positive = 2048
    """Connections that may wait for a worker in the kernel."""
    nodes: tuple[str, ...] = ()
    """Control endpoints of nodes that are known beforehand, beside those that announce themselves."""


class DiscoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How routers learn which nodes exist: a small proxy on each router host hands announcements to its workers.

    `kvferry serve` takes sockets in its run directory in place of the defaults, so that two clusters on one machine do
    not meet; it takes what is written here as soon as one of these keys differs from its default."""

    announce_to: tuple[str, ...] = ("tcp://127.0.0.1:1035",)
    """Where nodes announce themselves: the proxy of each router host. Names are resolved again every
    timers.resolve_s, and a name with several addresses means all of them. Empty: static endpoints only."""
    proxy_nodes: str = "tcp://127.0.0.1:1035"
    """What this host's proxy binds for the nodes. Empty: this host runs no proxy."""
    proxy_workers: str = "tcp://127.0.0.1:1036"
    """What this host's proxy binds for the router workers, and what these connect to."""
    allow_remote: bool = False
    """Let the proxy bind beyond loopback although no keys are configured."""


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys for every tcp and ipc socket: ops/docs/security.md. None by default, and then everything binds loopback.
    Paths are relative to the configuration file."""

    allowed_keys: str = ""
    """Whom this process lets in and whom it connects to: a directory of .pub files, or one file with a key a line. Read
    again when it changes. Needed with keys."""
    node_key_file: str = ""
    """The secret key of this host's nodes; a host without nodes needs none."""
    router_key_file: str = ""
    """The secret key of this host's router workers and proxy; a host without them needs none."""
    kv: Literal["on", "off"] = "on"
    """off: ferried KV travels without keys, for a network that encrypts by itself (WireGuard). The same on all nodes; a
    kv_bind beyond loopback then needs node.allow_remote."""

    @property
    def is_on(self) -> bool:
        """Whether keys are configured."""
        return bool(self.allowed_keys or self.node_key_file or self.router_key_file)


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for every node; [prefill], [decode] and [colocated] may say otherwise for one role."""

    max_model_len: Annotated[int, Meta(ge=2)] = 2560
    """Most tokens of one request, prompt and output together; cut to what the model was made for."""
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens in one block of KV cache. The same on all nodes."""
    kv_cache_bytes: Positive | None = None
    """KV cache of a node, in bytes, of all its ranks together. Worked out on a CPU: a tenth of the free memory shared
    by the host's nodes, at most 1 GiB; on other devices: what is left after the weights and device_reserve_share."""
    model_memory_bytes: Positive | None = None
    """Most memory that a node on a CPU may take beside its KV cache; a model that needs more is refused before it is
    loaded. Worked out by kvferry serve: what is free at its start, without the KV caches, in equal parts for its nodes.
    Whatever it is, a node that needs more than is free is refused."""
    device_reserve_share: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """Share of an accelerator's memory, of what is free after the weights, that the KV cache leaves alone: a step's
    activations and logits, buffers of kernels and libraries, and what the allocator loses between them. These grow
    with max_step_tokens and the vocabulary; running out of them ends the node. Without effect on a CPU, or with
    kv_cache_bytes."""
    swap_bytes: Annotated[int, Meta(ge=0)] | None = None
    """Host memory of a decoding node, in bytes, of all its ranks together, for KV of requests that must make room for
    others; 0: such requests are given back and computed again. Worked out on a CPU: 0, for the KV cache is in the same
    memory, and a larger one is worth more than a place beside it. On other devices: a tenth of the KV cache, since only
    what outgrows the cache goes there and comes back soon; at most a quarter of the host's free memory shared by its
    nodes."""
    threads: Positive | None = None
    """Threads that a node computes with. Worked out: the cores divided by nodes_on_host, at least 1."""
    nodes_on_host: Positive | None = None
    """How many nodes share a host. Worked out: serve.prefill + serve.decode + serve.colocated. Set it to 1 where a node
    has its host to itself."""
    tensor_parallel: Positive = 1
    """Processes that a node's model is cut over, with a device each (a CPU node's ranks share its threads). The same on
    all nodes. The model's heads, key-value heads and MLP sizes must divide by it."""
    max_step_tokens: Positive = 512
    """Tokens computed in one step, prefill chunks and decode tokens together: how finely a long prompt is cut."""
    max_running: Positive = 128
    """Requests that a node computes at the same time; never more than max_step_tokens."""
    steps_in_flight: Annotated[int, Meta(ge=1, le=2)] | None = None
    """Steps that the engine has been given at a time. 2: the next one is planned while one is computed, so that the
    engine never waits for the node's other work; a request that comes then waits for one step more. Worked out: 1 on a
    CPU, 2 on other devices."""
    graph_batches: tuple[Positive, ...] | None = None
    """Numbers of sequences for which a step that only decodes is recorded at the start and replayed as a whole (CUDA
    graphs, and the NPU's), filled up to the next number; other steps are started kernel by kernel. Worked out: 1, 2, 4
    and so on up to max_running. Empty: nothing is recorded. Without effect on a CPU, on prefill nodes, with
    tensor_parallel, and for models with experts."""
    share_weights: bool = True
    """Keep packed weights in the user's cache directory, where all nodes of a host map them and the next start finds
    them; the files of the last four models stay. For CPUs with native ops, models of 64 MiB or more, and weights that
    are not quantised."""
    prefix_cache: bool = True
    """Keep finished blocks, and take them again for prompts that begin alike."""
    checksum: bool = True
    """Put a checksum on every piece of ferried KV."""
    kv_transports: tuple[KvTransportName, ...] = ("shm", "zmq")
    """How KV may be ferried. shm: through memory that both nodes share, where they run on one host under one user and
    tensor_parallel is 1; zmq: over ZeroMQ, which is always among them, for everything else."""
    staging_slots: Positive = 32
    """Pieces that a decode node takes in through shared memory at a time; more come over ZeroMQ."""
    staging_slot_bytes: Positive = 4_194_304
    """The largest piece that goes through shared memory."""
    allow_remote: bool = False
    """Let a node bind beyond loopback although no keys are configured."""


class RoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one role's nodes; a key that is left out has [node]'s or [model]'s value."""

    name: str = ""
    """The node's name in answers and logs. Empty means role, host name and process id.
    `kvferry serve` names its nodes itself, prefill-0 say."""
    bind: str = "tcp://127.0.0.1:*"
    """Control endpoint to bind; a * takes a free port."""
    kv_bind: str = "tcp://127.0.0.1:*"
    """KV endpoint to bind; control and KV never share a connection. Rank i of a tensor-parallel node binds the i-th
    port after it."""
    advertise: str = ""
    """How others reach the control endpoint. Empty means as bound; needed when bind is a wildcard address. A port of
    * stands for the bound one."""
    kv_advertise: str = ""
    """How others reach the KV endpoint; as advertise."""
    device: DeviceName | None = None
    """In place of model.device."""
    device_index: Annotated[int, Meta(ge=0)] = 0
    """Which of several accelerators; rank i of a tensor-parallel node takes the i-th after it."""
    kv_cache_bytes: Positive | None = None
    """In place of node.kv_cache_bytes."""
    threads: Positive | None = None
    """In place of node.threads."""
    max_step_tokens: Positive | None = None
    """In place of node.max_step_tokens."""
    max_running: Positive | None = None
    """In place of node.max_running."""


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the processes write to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is written."""
    format: Literal["human", "json"] = "human"
    """Lines to read, or one JSON object a line."""
    access_log: bool = True
    """One line per HTTP request; health checks and scrapes of metrics only at level debug."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kvferry serve`: a whole cluster on this machine."""

    prefill: Count | None = None
    """Prefill nodes to start. Worked out: 1, or 0 where serve.colocated is above 0."""
    decode: Count | None = None
    """Decode nodes to start. Worked out: 1, or 0 where serve.colocated is above 0."""
    colocated: Count = 0
    """Nodes to start that both compute prompts and generate: nothing is ferried for what such a node computes."""
    stop_bound_s: Seconds = 30.0
    """How long an orderly stop lets requests finish, per stage: router, then prefill, then decode. Caps
    timers.worker_drain_s and timers.node_drain_s."""
    restart_min_s: Seconds = 0.5
    """Wait before the first restart of a child that died; it doubles with every quick death."""
    restart_max_s: Seconds = 10.0
    """The longest wait before a restart."""
    healthy_after_s: Seconds = 10.0
    """A child that lived this long starts again with the shortest wait."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster, as one file describes it."""

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
        """The section of one role."""
        return {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}[role]


def section_types() -> dict[str, type[msgspec.Struct]]:
    """Section name -> its struct, in the order in which they are shown."""
    return {field.name: type(field.default) for field in msgspec.structs.fields(ClusterConfig)}
