"""Checks over several keys, endpoints, and the values derived for a node."""

from pathlib import Path

import pytest

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.checks import config_notes, host_notes, model_name
from kvferry.common.config.endpoints import endpoint_of_rank, parse_endpoint
from kvferry.common.config.host import HostFacts, probe_host, quota_cores
from kvferry.common.config.load import load_config, parse_override
from kvferry.common.config.resolve import default_kv_cache_bytes, resolve_node
from kvferry.common.config.schema import ClusterConfig

KEY = "0a" * 32
HOST = HostFacts(cores=8, free_memory_bytes=40 << 30)


KEYS = ("security.node_key_file=n", "security.router_key_file=r", "security.allowed_keys=a")


def load_set(*texts: str) -> ClusterConfig:
    return load_config(None, [parse_override(text) for text in texts])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["model.name=a/b"], "model.name"),
        (["model.name=' a'"], "model.name"),
        (["timers.heartbeat_s=1.5"], "timers.heartbeat_s"),
        (["timers.suspect_s=2.5"], "timers.suspect_s"),
        (["timers.client_timeout_s=0.5"], "timers.heartbeat_s"),
        (["timers.engine_stall_s=30"], "timers.engine_stall_s"),
        (["timers.backoff_min_s=3"], "timers.backoff_min_s"),
        (["timers.retain_s=-1"], "timers.retain_s"),
        (["timers.retain_s=0"], "timers.retain_s"),
        (["timers.heartbeat_s=nan"], "timers.heartbeat_s"),
        (["node.tensor_parallel=0"], "node.tensor_parallel"),
        (["node.tensor_parallel=2", "decode.kv_bind=inproc://x"], "decode.kv_bind"),
        (["node.tensor_parallel=4", "decode.kv_bind=tcp://127.0.0.1:65533"], "decode.kv_bind"),
        (["timers.node_drain_s=inf"], "timers.node_drain_s"),
        (["limits.retained_share=1.5"], "limits.retained_share"),
        (["limits.max_attempts=0"], "limits.max_attempts"),
        (["limits.piece_target_bytes=1000000000"], "limits.piece_target_bytes"),
        (["limits.piece_target_bytes=65535"], "limits.piece_target_bytes"),
        (["limits.transfers_per_peer=17"], "limits.transfers_per_peer"),
        (["serve.restart_min_s=11"], "serve.restart_min_s"),
        (["node.kv_transports=['shm']"], "node.kv_transports"),
        (["prefill.bind=tcp://10.0.0.1:*"], "prefill.bind"),
        (["decode.kv_bind=tcp://0.0.0.0:*"], "decode.kv_bind"),
        (["node.allow_remote=true", "decode.kv_bind=tcp://0.0.0.0:*"], "decode.kv_advertise"),
        (["decode.advertise=tcp://*:5"], "decode.advertise"),
        (["decode.bind=http://a"], "decode.bind"),
        (["router.nodes=['tcp://a']"], "router.nodes"),
        (["discovery.announce_to=['a:1']"], "discovery.announce_to"),
        (["discovery.proxy_nodes=tcp://*:1035"], "discovery.proxy_nodes"),
        (["discovery.allow_remote=true", "discovery.proxy_workers=tcp://*:1036"], "discovery.proxy_workers"),
        (["discovery.proxy_workers=tcp://127.0.0.1:1035"], "discovery.proxy_workers"),
        (["security.node_key_file=a"], "security.allowed_keys"),
        (["security.allowed_keys=a"], "security.node_key_file"),
        ([*KEYS, "security.kv=off", "prefill.kv_bind=tcp://10.0.0.1:*"], "prefill.kv_bind"),
        ([*KEYS, "discovery.proxy_workers=tcp://10.0.0.1:5"], "discovery.proxy_workers"),
    ],
)
def test_an_invalid_configuration_is_refused_and_the_key_named(settings: list[str], key: str):
    with pytest.raises(ConfigError) as caught:
        load_set(*settings)
    assert str(caught.value).startswith(key + ":")


def test_zero_is_accepted_where_it_means_none():
    assert load_set("timers.retry_jitter_s=0").timers.retry_jitter_s == 0
    assert load_set("limits.unreserved_prompt_share=0").limits.unreserved_prompt_share == 0


def test_allow_remote_permits_a_remote_bind():
    config = load_set(
        "node.allow_remote=true", "prefill.bind=tcp://10.0.0.1:*", "decode.bind=tcp://*:7", "decode.advertise=tcp://a:*"
    )
    assert config.prefill.bind == "tcp://10.0.0.1:*"


def test_keys_permit_a_remote_bind():
    config = load_set(*KEYS, "prefill.bind=tcp://10.0.0.1:*", "decode.kv_bind=tcp://10.0.0.1:*")
    assert config.decode.kv_bind == "tcp://10.0.0.1:*"
    config = load_set(*KEYS, "discovery.proxy_nodes=tcp://10.0.0.1:1035")
    assert config.discovery.proxy_nodes == "tcp://10.0.0.1:1035"
    config = load_set(*KEYS, "security.kv=off", "prefill.bind=tcp://10.0.0.1:*")
    (note,) = config_notes(config)
    assert "security.kv = off" in note


def test_relative_key_files_are_relative_to_the_file_or_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "hosts" / "cluster.toml"
    file.parent.mkdir()
    file.write_text('[security]\nallowed_keys = "allowed"\nnode_key_file = "/k/node.secret"\n')
    monkeypatch.chdir(tmp_path)
    security = load_config(file, [parse_override("security.router_key_file=r.secret")]).security
    assert security.allowed_keys == str(tmp_path / "hosts" / "allowed")
    assert security.node_key_file == "/k/node.secret"
    assert security.router_key_file == str(tmp_path / "r.secret")


def test_no_proxy_needs_no_proxy_endpoints():
    assert load_set("discovery.proxy_nodes=''", "discovery.announce_to=[]").discovery.proxy_nodes == ""


def test_config_notes():
    assert config_notes(load_config()) == ()
    (note,) = config_notes(load_set("node.max_model_len=2048"))
    assert "prompts are limited to 2047 tokens" in note
    (note,) = config_notes(load_set("discovery.announce_to=[]"))
    assert "no router will find a node" in note


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], ""),
        (["model.path=/m/llama-7b"], "llama-7b"),
        (["model.path=/m/tiny.q4.gguf"], "tiny.q4"),
        (["model.path=/m/v1.5"], "v1.5"),
        (["model.path=/m/a.gguf", "model.name=b"], "b"),
    ],
)
def test_the_model_name_defaults_to_its_path(settings: list[str], name: str):
    assert model_name(load_set(*settings)) == name


@pytest.mark.parametrize(
    ("settings", "cores", "expected"),
    [
        ((), 2, ""),
        ((), 1, "2 nodes with 2 threads in total share 1 core:"),
        (("serve.prefill=100",), 2, "101 nodes with 101 threads in total share 2 cores:"),
        (("serve.colocated=1",), 1, ""),
        (("node.threads=4",), 8, ""),
        (("node.threads=5",), 8, "2 nodes with 10 threads in total share 8 cores:"),
        (("node.tensor_parallel=2",), 2, "2 nodes with 4 threads in total share 2 cores:"),
    ],
)
def test_more_threads_than_cores_are_noted(settings: tuple[str, ...], cores: int, expected: str):
    notes = host_notes(load_set(*settings), HostFacts(cores=cores, free_memory_bytes=40 << 30))
    assert [expected in note for note in notes] == [True] * bool(expected)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tcp://127.0.0.1:5", ("tcp", "127.0.0.1", 5)),
        ("tcp://*:*", ("tcp", "*", 0)),
        ("tcp://[::1]:5", ("tcp", "::1", 5)),
        ("ipc:///run/a", ("ipc", "/run/a", None)),
        ("inproc://a", ("inproc", "a", None)),
    ],
)
def test_endpoints_are_parsed(text: str, parts: tuple[str, str, int | None]):
    assert tuple(parse_endpoint(text)) == (*parts, "")
    assert tuple(parse_endpoint(f"{text}?key={KEY}")) == (*parts, KEY)


@pytest.mark.parametrize(
    "text",
    [
        "tcp://a:1?key=",
        f"tcp://a:1?key={KEY}0",
        f"ipc://a?key={'0A' * 32}",
        "",
        "tcp://",
        "tcp://a",
        "tcp://:1",
        "tcp://a:65536",
        "tcp://a:x",
        "udp://a:1",
        "a:1",
    ],
)
def test_an_invalid_endpoint_is_refused(text: str):
    with pytest.raises(ConfigError, match="not an endpoint"):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("text", "local", "wildcard"),
    [
        ("tcp://127.0.0.1:1", True, False),
        ("tcp://127.8.9.1:1", True, False),
        ("tcp://[::1]:1", True, False),
        ("tcp://localhost:1", True, False),
        ("tcp://host:1", False, False),
        ("tcp://10.0.0.1:1", False, False),
        ("tcp://*:1", False, True),
        ("tcp://[::]:1", False, True),
        ("ipc://a", True, False),
        ("inproc://a", True, False),
    ],
)
def test_local_and_wildcard_endpoints(text: str, local: bool, wildcard: bool):
    endpoint = parse_endpoint(text)
    assert (endpoint.is_local, endpoint.is_wildcard) == (local, wildcard)


def test_the_nodes_of_a_host_share_its_threads_and_memory():
    settings = resolve_node(load_set("serve.prefill=2", "serve.decode=2"), "prefill", HOST)
    assert settings.threads == 2
    assert settings.kv_cache_bytes is None
    assert settings.kv_cache_bytes_on_cpu == 1 << 30
    mixed = resolve_node(load_set("serve.prefill=1", "serve.colocated=3", "colocated.threads=3"), "colocated", HOST)
    assert mixed.threads == 3
    assert resolve_node(load_set("serve.prefill=1", "serve.colocated=3"), "colocated", HOST).threads == 2
    alone = resolve_node(load_set("node.nodes_on_host=1"), "decode", HOST)
    assert alone.threads == 8
    oversubscribed = resolve_node(load_set("node.nodes_on_host=99"), "decode", HOST)
    assert oversubscribed.threads == 1


def test_a_roles_values_override_those_of_all_nodes():
    config = load_set(
        "node.threads=4",
        "decode.threads=3",
        "decode.device=cuda",
        "node.kv_cache_bytes=1000",
        "decode.kv_cache_bytes=2000",
        "node.max_step_tokens=64",
        "prefill.max_running=9",
    )
    prefill, decode = resolve_node(config, "prefill", HOST), resolve_node(config, "decode", HOST)
    assert (prefill.threads, decode.threads) == (4, 3)
    assert (prefill.device, decode.device) == ("auto", "cuda")
    assert (prefill.max_running, decode.max_running) == (9, 64)
    assert (prefill.kv_cache_bytes, decode.kv_cache_bytes) == (1000, 2000)


def test_only_decoding_nodes_swap_and_within_free_memory():
    config = load_set("node.swap_bytes=1000", "serve.prefill=2", "serve.decode=2")
    assert resolve_node(config, "prefill", HOST).swap_bytes == 0
    decode = resolve_node(config, "decode", HOST)
    assert decode.swap_bytes == 1000
    assert decode.max_swap_bytes == HOST.free_memory_bytes // 16
    assert resolve_node(load_set("node.swap_bytes=0"), "decode", HOST).swap_bytes == 0
    assert resolve_node(load_set(), "decode", HOST).swap_bytes is None


def test_at_most_two_steps_are_in_flight():
    assert resolve_node(load_set(), "decode", HOST).steps_in_flight is None
    assert resolve_node(load_set("node.steps_in_flight=2"), "prefill", HOST).steps_in_flight == 2
    for number in (0, 3):
        with pytest.raises(ConfigError, match=r"node\.steps_in_flight"):
            load_set(f"node.steps_in_flight={number}")


def test_the_default_kv_cache_has_a_minimum_and_a_maximum():
    assert default_kv_cache_bytes(1 << 20, 2) == 64 << 20
    assert default_kv_cache_bytes(8 << 30, 2) == int((8 << 30) * 0.1) // 2
    assert default_kv_cache_bytes(1 << 50, 2) == 1 << 30


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 2), ("1000 100000", 1), ("", None)]
)
def test_a_container_quota_limits_cores(text: str, cores: int | None):
    assert quota_cores(text) == cores


def test_this_host_has_cores_and_memory():
    host = probe_host()
    assert host.cores >= 1
    assert host.free_memory_bytes > 0


@pytest.mark.parametrize(
    ("own", "second"),
    [
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("tcp://[::1]:7000", "tcp://[::1]:7002"),
        (f"tcp://10.0.0.1:7000?key={KEY}", f"tcp://10.0.0.1:7002?key={KEY}"),
        ("ipc:///run/kv", "ipc:///run/kv.2"),
        ("", ""),
    ],
)
def test_each_rank_has_its_own_endpoint(own: str, second: str):
    assert endpoint_of_rank(own, 0) == own
    assert endpoint_of_rank(own, 2) == second


def test_the_ranks_of_a_node_share_its_threads():
    config = load_set("node.nodes_on_host=1", "node.tensor_parallel=3")
    assert resolve_node(config, "prefill", HOST).threads == 2
    assert resolve_node(load_set("node.threads=1", "node.tensor_parallel=3"), "prefill", HOST).threads == 1
