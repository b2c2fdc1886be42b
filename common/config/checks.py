"""Checks that look at several keys at once, or at more than a type says. Pure.

`check_config` refuses what cannot work; `config_notes` and `host_notes` tell what works but may not be meant.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.endpoints import Endpoint, parse_endpoint
from kvferry.common.config.host import HostFacts
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.resolve import node_counts, resolve_node
from kvferry.common.config.schema import NODE_KINDS, ClusterConfig, RoleConfig
from kvferry.common.config.toml import quote
from kvferry.common.kv.transports import MESSAGE_TRANSPORT

_MAY_BE_ZERO = {"retry_jitter_s", "deadline_grace_s", "new_wait_s"}
_IN_ORDER = (
    ("heartbeat_s", "suspect_s"),
    ("suspect_s", "dead_after_s"),
    ("heartbeat_s", "client_silent_s"),
    ("engine_stall_s", "engine_stall_exit_s"),
    ("link_heartbeat_s", "link_timeout_s"),
)
_NOT_ABOVE = (("backoff_min_s", "backoff_max_s"), ("reconnect_min_s", "reconnect_max_s"), ("repeat_s", "commit_wait_s"))


_LONGEST_S = 1e9
_SHORTEST_S = 0.001
_LEAST_HEADER_BYTES = 65_536
_LEAST_PIECE_BYTES = 65_536
"""A Commit counts to a million: of smaller pieces a long prompt would have more."""
_ID_BYTES = 4
_LARGEST = 2**53
_MOST = {
    "router.workers": 1024,
    "router.backlog": 65_535,
    "node.threads": 4096,
    "node.nodes_on_host": 1024,
    "node.tensor_parallel": 1024,
    "node.staging_slots": 65_536,
    "node.staging_slot_bytes": 2**30,
    "limits.control_high_water": 10**6,
    **dict.fromkeys(("timers.link_heartbeat_s", "timers.link_timeout_s"), 86_400),
    **dict.fromkeys(("timers.reconnect_min_s", "timers.reconnect_max_s"), 86_400),
    "serve.prefill": 1024,
    "serve.decode": 1024,
    "serve.colocated": 1024,
    **{f"{role}.threads": 4096 for role in NODE_KINDS},
}
"""More processes or threads would take the host down; larger numbers would not fit where the system takes them."""


def check_config(config: ClusterConfig) -> None:
    """ConfigError for the first thing that cannot work."""
    if "/" in config.model.name:
        raise ConfigError(f"model.name: {config.model.name!r} has a slash, so no URL could name it")
    for key, text in _names(config):
        if not text.isprintable():
            raise ConfigError(f"{key}: {quote(text)} has characters that cannot be printed")
    _check_sizes(config)
    if config.model.name != config.model.name.strip():
        raise ConfigError("model.name: begins or ends with white space")
    _check_timers(config.timers)
    _check_limits(config.limits)
    if config.limits.job_ids_max_bytes < _ID_BYTES * config.node.max_model_len:
        least = _ID_BYTES * config.node.max_model_len
        raise ConfigError(f"limits.job_ids_max_bytes: expected at least {least}, {_ID_BYTES} a token of max_model_len")
    if config.serve.restart_min_s > config.serve.restart_max_s:
        raise ConfigError("serve.restart_min_s: must not be above serve.restart_max_s")
    _check_counts(config)
    for role in NODE_KINDS:
        _check_role(role, config.role(role), config)
    _check_transports(config)
    _check_discovery(config)
    _check_security(config)


def config_notes(config: ClusterConfig) -> tuple[str, ...]:
    """What is allowed but may surprise, one line each; for the log."""
    return tuple(_notes(config))


def host_notes(config: ClusterConfig, host: HostFacts) -> tuple[str, ...]:
    """What this host may be too small for, one line each, where all nodes of the configuration are started on it.
    Memory is not among it: nodes refuse what does not fit."""
    counts = node_counts(config)
    size = config.node.tensor_parallel
    threads = sum(resolve_node(config, role, host).threads * size * number for role, number in counts.items())
    if threads <= host.cores:
        return ()
    cores = f"{host.cores} core" + ("" if host.cores == 1 else "s")
    return (
        f"serve.prefill, serve.decode, serve.colocated: {sum(counts.values())} nodes with {threads} threads in all share "
        f"{cores}: they start slowly and wait for one another",
    )


def model_name(config: ClusterConfig) -> str:
    """The name that URLs have: model.name, else the file's or directory's own; empty where neither is given."""
    if config.model.name or not config.model.path:
        return config.model.name
    path = Path(config.model.path)
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def _names(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    yield "model.name", config.model.name
    yield "model.path", config.model.path
    yield "router.host", config.router.host
    for role in NODE_KINDS:
        yield f"{role}.name", config.role(role).name


def _check_sizes(config: ClusterConfig) -> None:
    """Numbers beyond all reason would fail somewhere later, and tell of something else."""
    for section, content in msgspec.to_builtins(config).items():
        for key, value in content.items():
            name = f"{section}.{key}"
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            most = _MOST.get(name, _LONGEST_S if isinstance(value, float) else _LARGEST)
            if not value <= most:
                raise ConfigError(f"{name}: expected at most {most:g}, got {value:g}")


def _check_timers(timers: Timers) -> None:
    for name, value in msgspec.structs.asdict(timers).items():
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            raise ConfigError(f"timers.{name}: expected a number of seconds above 0, got {value:g}")
        if 0 < value < _SHORTEST_S:
            raise ConfigError(f"timers.{name}: expected at least {_SHORTEST_S:g} s, got {value:g}")
    for low, high in _IN_ORDER:
        if getattr(timers, low) >= getattr(timers, high):
            raise ConfigError(f"timers.{low}: must be below timers.{high}")
    for low, high in _NOT_ABOVE:
        if getattr(timers, low) > getattr(timers, high):
            raise ConfigError(f"timers.{low}: must not be above timers.{high}")


def _check_transports(config: ClusterConfig) -> None:
    if MESSAGE_TRANSPORT not in config.node.kv_transports:
        raise ConfigError(
            f"node.kv_transports: must include {MESSAGE_TRANSPORT}, which carries the messages of the others"
        )


def _check_limits(limits: Limits) -> None:
    for name, value in msgspec.structs.asdict(limits).items():
        if name.endswith("_share"):
            if not 0 <= value <= 1:
                raise ConfigError(f"limits.{name}: expected a share from 0 to 1, got {value:g}")
        elif value < 1:
            raise ConfigError(f"limits.{name}: expected at least 1, got {value}")
    if limits.header_max_bytes < _LEAST_HEADER_BYTES:
        raise ConfigError(f"limits.header_max_bytes: expected at least {_LEAST_HEADER_BYTES}")
    if limits.piece_target_bytes < _LEAST_PIECE_BYTES:
        raise ConfigError(f"limits.piece_target_bytes: expected at least {_LEAST_PIECE_BYTES}")
    if limits.piece_target_bytes > limits.piece_max_bytes:
        raise ConfigError("limits.piece_target_bytes: must not be above limits.piece_max_bytes")
    if limits.transfers_per_peer > limits.transfers_per_node:
        raise ConfigError("limits.transfers_per_peer: must not be above limits.transfers_per_node")


def _check_counts(config: ClusterConfig) -> None:
    counts = node_counts(config)
    for role in ("prefill", "decode"):
        if counts[role] + counts["colocated"] < 1:
            raise ConfigError(f"serve.{role}: at least 1 without colocated nodes (serve.colocated), got {counts[role]}")


def _check_role(role: str, section: RoleConfig, config: ClusterConfig) -> None:
    for key, keyed in (
        ("bind", config.security.is_on),
        ("kv_bind", config.security.is_on and config.security.kv == "on"),
    ):
        _check_bind(f"{role}.{key}", getattr(section, key), keyed or config.node.allow_remote, "node.allow_remote")
    _check_ranks(role, section, config.node.tensor_parallel)
    for bind_key, key in (("bind", "advertise"), ("kv_bind", "kv_advertise")):
        advertised = getattr(section, key)
        if advertised:
            if _endpoint(f"{role}.{key}", advertised).is_wildcard:
                raise ConfigError(f"{role}.{key}: {advertised} is no address that others can connect to")
        elif _endpoint(f"{role}.{bind_key}", getattr(section, bind_key)).is_wildcard:
            raise ConfigError(f"{role}.{key}: needed, for {role}.{bind_key} is a wildcard address")


def _check_ranks(role: str, section: RoleConfig, size: int) -> None:
    for key in ("kv_bind", "kv_advertise") if size > 1 else ():
        text = getattr(section, key)
        endpoint = _endpoint(f"{role}.{key}", text) if text else None
        if endpoint is not None and endpoint.scheme == "inproc":
            raise ConfigError(f"{role}.{key}: {text} does not reach the other ranks' processes")
        if endpoint is not None and (endpoint.port or 0) + size - 1 > 65535:
            raise ConfigError(f"{role}.{key}: {text} leaves no ports for {size} ranks")


def _check_discovery(config: ClusterConfig) -> None:
    discovery = config.discovery
    for endpoint in discovery.announce_to:
        _endpoint("discovery.announce_to", endpoint)
    for endpoint in config.router.nodes:
        _endpoint("router.nodes", endpoint)
    if discovery.proxy_nodes:
        may_be_remote = discovery.allow_remote or config.security.is_on
        _check_bind("discovery.proxy_nodes", discovery.proxy_nodes, may_be_remote, "discovery.allow_remote")
        if not _endpoint("discovery.proxy_workers", discovery.proxy_workers).is_local:
            raise ConfigError(f"discovery.proxy_workers: {discovery.proxy_workers} is for workers of this host alone")
        if discovery.proxy_nodes == discovery.proxy_workers:
            raise ConfigError("discovery.proxy_workers: must differ from discovery.proxy_nodes")


def _check_security(config: ClusterConfig) -> None:
    security = config.security
    if security.is_on and not security.allowed_keys:
        raise ConfigError("security.allowed_keys: needed with keys: it says whom to let in")
    if security.is_on and not (security.node_key_file or security.router_key_file):
        raise ConfigError(
            "security.node_key_file: needed with security.allowed_keys, or security.router_key_file, or both"
        )


def _check_bind(name: str, text: str, may_be_remote: bool, switch: str) -> None:
    if not _endpoint(name, text).is_local and not may_be_remote:
        raise ConfigError(
            f"{name}: {text} can be reached from other hosts and no keys are configured for it; "
            f"bind loopback, configure [security], or set {switch} = true on a network of your own"
        )


def _endpoint(name: str, text: str) -> Endpoint:
    try:
        return parse_endpoint(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _notes(config: ClusterConfig) -> Iterator[str]:
    node, router = config.node, config.router
    if router.max_input_length >= node.max_model_len:
        yield (
            f"router.max_input_length = {router.max_input_length}: prompts end at {node.max_model_len - 1} tokens "
            f"all the same, for node.max_model_len = {node.max_model_len}"
        )
    if not config.discovery.announce_to and not router.nodes:
        yield "discovery.announce_to and router.nodes are both empty: no router will find a node"
    if config.security.is_on and config.security.kv == "off":
        yield "security.kv = off: prompts' KV travels in the clear, and whoever reaches a kv_bind may speak to it"
