"""Checks of a configuration beyond the types of single keys: relations between keys, ranges, endpoints. Pure.

`check_config` refuses a configuration that cannot work; `config_notes` and `host_notes` warn about surprising ones.
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

_MAY_BE_ZERO = {"retry_jitter_s", "deadline_grace_s", "new_request_wait_s"}
_STRICTLY_BELOW = (
    ("heartbeat_s", "suspect_s"),
    ("suspect_s", "dead_after_s"),
    ("heartbeat_s", "client_timeout_s"),
    ("engine_stall_s", "engine_stall_exit_s"),
    ("link_heartbeat_s", "link_timeout_s"),
)
_NOT_ABOVE = (
    ("backoff_min_s", "backoff_max_s"),
    ("reconnect_min_s", "reconnect_max_s"),
    ("retransmit_s", "commit_timeout_s"),
)


_MAX_SECONDS = 1e9
_MIN_SECONDS = 0.001
_MIN_HEADER_BYTES = 65_536
_MIN_PIECE_BYTES = 65_536
"""A Commit counts at most a million pieces; with smaller ones a long prompt would have more."""
_TOKEN_ID_BYTES = 4
_MAX_INTEGER = 2**53
_MAX = {
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
"""Upper bounds: more processes or threads would overload the host, larger numbers would overflow in system calls."""


def check_config(config: ClusterConfig) -> None:
    """ConfigError, starting with the key, for the first error found."""
    if "/" in config.model.name:
        raise ConfigError(f"model.name: {config.model.name!r} contains a slash, so no URL can contain it")
    for key, text in _names(config):
        if not text.isprintable():
            raise ConfigError(f"{key}: {quote(text)} contains characters that are not printable")
    _check_sizes(config)
    if config.model.name != config.model.name.strip():
        raise ConfigError(f"model.name: {config.model.name!r} starts or ends with white space")
    _check_timers(config.timers)
    _check_limits(config.limits)
    least = _TOKEN_ID_BYTES * config.node.max_model_len
    if config.limits.job_token_ids_max_bytes < least:
        raise ConfigError(
            f"limits.job_token_ids_max_bytes: expected at least {least} ({_TOKEN_ID_BYTES} bytes for each token of "
            f"node.max_model_len), got {config.limits.job_token_ids_max_bytes}"
        )
    _check_order("serve", config.serve, (("restart_min_s", "restart_max_s"),), strictly=False)
    _check_counts(config)
    for role in NODE_KINDS:
        _check_role(role, config.role(role), config)
    _check_transports(config)
    _check_discovery(config)
    _check_security(config)


def config_notes(config: ClusterConfig) -> tuple[str, ...]:
    """Warnings about a valid configuration, one line each."""
    return tuple(_notes(config))


def host_notes(config: ClusterConfig, host: HostFacts) -> tuple[str, ...]:
    """Warnings, one line each, about a host that is too small to run all nodes of the configuration.

    Does not check memory: nodes refuse what does not fit.
    """
    counts = node_counts(config)
    size = config.node.tensor_parallel
    threads = sum(resolve_node(config, role, host).threads * size * number for role, number in counts.items())
    if threads <= host.cores:
        return ()
    cores = f"{host.cores} core" + ("" if host.cores == 1 else "s")
    return (
        f"serve.prefill, serve.decode, serve.colocated: {sum(counts.values())} nodes with {threads} threads in total "
        f"share {cores}: they start slowly and slow each other down",
    )


def model_name(config: ClusterConfig) -> str:
    """The model's name in URLs: model.name, else the name of the file or directory; empty when neither is set."""
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
    """Refuse absurdly large numbers: they would fail later with a misleading error."""
    for section, content in msgspec.to_builtins(config).items():
        for key, value in content.items():
            name = f"{section}.{key}"
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            greatest = _MAX.get(name, _MAX_SECONDS if isinstance(value, float) else _MAX_INTEGER)
            if not value <= greatest:
                raise ConfigError(f"{name}: expected at most {_number(greatest)}, got {_number(value)}")


def _check_timers(timers: Timers) -> None:
    for name, value in msgspec.structs.asdict(timers).items():
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            raise ConfigError(f"timers.{name}: expected a number of seconds above 0, got {value:g}")
        if 0 < value < _MIN_SECONDS:
            raise ConfigError(f"timers.{name}: expected at least {_MIN_SECONDS:g} s, got {value:g}")
    _check_order("timers", timers, _STRICTLY_BELOW, strictly=True)
    _check_order("timers", timers, _NOT_ABOVE, strictly=False)


def _check_order(name: str, section: msgspec.Struct, pairs: tuple[tuple[str, str], ...], *, strictly: bool) -> None:
    for low, high in pairs:
        lower, upper = getattr(section, low), getattr(section, high)
        if lower > upper or (strictly and lower == upper):
            relation = "less than" if strictly else "at most"
            raise ConfigError(
                f"{name}.{low}: expected {relation} {name}.{high} ({_number(upper)}), got {_number(lower)}"
            )


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_transports(config: ClusterConfig) -> None:
    if MESSAGE_TRANSPORT not in config.node.kv_transports:
        raise ConfigError(
            f"node.kv_transports: must include {MESSAGE_TRANSPORT}, which carries the messages of the others"
        )


def _check_limits(limits: Limits) -> None:
    for name, value in msgspec.structs.asdict(limits).items():
        if name.endswith("_share"):
            if not 0 <= value <= 1:
                raise ConfigError(f"limits.{name}: expected a fraction from 0 to 1, got {value:g}")
        elif value < 1:
            raise ConfigError(f"limits.{name}: expected at least 1, got {value}")
    for name, least in (("header_max_bytes", _MIN_HEADER_BYTES), ("piece_target_bytes", _MIN_PIECE_BYTES)):
        if getattr(limits, name) < least:
            raise ConfigError(f"limits.{name}: expected at least {least}, got {getattr(limits, name)}")
    pairs = (("piece_target_bytes", "piece_max_bytes"), ("transfers_per_peer", "transfers_per_node"))
    _check_order("limits", limits, pairs, strictly=False)


def _check_counts(config: ClusterConfig) -> None:
    counts = node_counts(config)
    for role in ("prefill", "decode"):
        if counts[role] + counts["colocated"] < 1:
            raise ConfigError(f"serve.{role}: expected at least 1 when serve.colocated is 0, got {counts[role]}")


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
                raise ConfigError(
                    f"{role}.{key}: {advertised} is a wildcard address; set the address that peers connect to"
                )
        elif _endpoint(f"{role}.{bind_key}", bound := getattr(section, bind_key)).is_wildcard:
            raise ConfigError(
                f"{role}.{key}: must be set to the address that peers connect to, because {role}.{bind_key} "
                f"({bound}) is a wildcard address"
            )


def _check_ranks(role: str, section: RoleConfig, size: int) -> None:
    for key in ("kv_bind", "kv_advertise") if size > 1 else ():
        text = getattr(section, key)
        endpoint = _endpoint(f"{role}.{key}", text) if text else None
        if endpoint is not None and endpoint.scheme == "inproc":
            raise ConfigError(
                f"{role}.{key}: {text} is only reachable within one process, and a node with node.tensor_parallel = "
                f"{size} has {size}; use tcp or ipc"
            )
        if endpoint is not None and (endpoint.port or 0) + size - 1 > 65535:
            raise ConfigError(
                f"{role}.{key}: {text} leaves too few ports for {size} ranks; expected a port of at most "
                f"{65535 - size + 1}"
            )


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
            raise ConfigError(
                f"discovery.proxy_workers: {discovery.proxy_workers} is reachable from other hosts, but only workers "
                "of this host connect to it; use a loopback address or ipc"
            )
        if discovery.proxy_nodes == discovery.proxy_workers:
            raise ConfigError(
                f"discovery.proxy_workers: must differ from discovery.proxy_nodes, but both are {discovery.proxy_nodes}"
            )


def _check_security(config: ClusterConfig) -> None:
    security = config.security
    if security.is_on and not security.allowed_keys:
        raise ConfigError("security.allowed_keys: must be set when a key file is: it lists the keys of allowed peers")
    if security.is_on and not (security.node_key_file or security.router_key_file):
        raise ConfigError(
            "security.node_key_file: this or security.router_key_file must be set together with security.allowed_keys"
        )


def _check_bind(name: str, text: str, may_be_remote: bool, switch: str) -> None:
    if not _endpoint(name, text).is_local and not may_be_remote:
        raise ConfigError(
            f"{name}: {text} is reachable from other hosts and no keys are configured for it; "
            f"bind loopback, configure [security], or on a trusted network set {switch} = true"
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
            f"router.max_input_length = {router.max_input_length} has no effect: prompts are limited to "
            f"{node.max_model_len - 1} tokens by node.max_model_len = {node.max_model_len}"
        )
    if not config.discovery.announce_to and not router.nodes:
        yield "discovery.announce_to and router.nodes are both empty: no router will find a node"
    if config.security.is_on and config.security.kv == "off":
        yield "security.kv = off: KV is sent unencrypted, and any host that can reach a kv_bind can send KV to it"
