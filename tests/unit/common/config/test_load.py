"""Reading a configuration: accepted values, refused values and their error messages."""

from pathlib import Path

import pytest

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.load import Override, load_config, parse_override


def load_set(*texts: str):
    return load_config(None, [parse_override(text) for text in texts])


def test_documented_defaults():
    config = load_config()
    assert (config.router.max_input_length, config.router.max_iter_times) == (2048, 512)
    assert config.router.max_body_bytes == 40_000_000
    assert (config.router.host, config.router.port, config.router.workers) == ("127.0.0.1", 1025, 2)
    assert config.node.kv_cache_bytes is None
    assert config.node.threads is None
    assert config.timers.heartbeat_s == 0.5
    assert config.limits.max_attempts == 5


def test_overrides_take_precedence_over_the_file_and_the_last_one_wins(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text("[router]\nport = 7\nworkers = 3\n[timers]\nheartbeat_s = 1\n")
    config = load_config(file, [Override("router", "port", 8), Override("router", "port", 9)])
    assert (config.router.port, config.router.workers, config.timers.heartbeat_s) == (9, 3, 1.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("node.block_size=32", 32),
        ("node.prefix_cache = false", False),
        ("model.name=m", "m"),
        ('model.name="a b"', "a b"),
        ("router.nodes=['tcp://a:1']", ["tcp://a:1"]),
        ("prefill.bind=tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("model.path=/a=b", "/a=b"),
    ],
)
def test_set_accepts_toml_values_and_plain_words(text: str, value: object):
    assert parse_override(text).value == value


@pytest.mark.parametrize("text", ["", "a", "a.b", "a=1", ".b=1", "a.=1", "a.b=1\nc=2"])
def test_set_refuses_an_invalid_setting(text: str):
    with pytest.raises(ConfigError, match="expected"):
        parse_override(text)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("node.block_sizes=3", "node.block_sizes: unknown key; did you mean node.block_size?"),
        ("node.workers=3", "node.workers: unknown key; did you mean router.workers?"),
        ("log.zzzzz=3", "log.zzzzz: unknown key; the keys of [log] are level, format, access_log"),
        ("nod.x=1", "[nod]: unknown section; did you mean [node]?"),
        ("node.block_size=abc", 'node.block_size: expected integer from 1 to 1024, got "abc"'),
        ("node.block_size=0", "node.block_size: expected integer from 1 to 1024, got 0"),
        ("node.block_size=16.0", "node.block_size: expected integer from 1 to 1024, got 16.0"),
        ("node.threads=true", "node.threads: expected integer, at least 1, got true"),
        ("model.dtype=float16", 'model.dtype: expected one of "auto", "bfloat16", "float32", got "float16"'),
        ("router.nodes=['a',1]", 'router.nodes[1]: expected array of strings, got ["a", 1]'),
        ("node.prefix_cache=1", "node.prefix_cache: expected true or false, got 1"),
        ("log.level=1979-05-27", "log.level: expected one of"),
        ("serve.stop_timeout_s=0", "serve.stop_timeout_s: expected number above 0, got 0"),
    ],
)
def test_errors_name_the_key_and_the_expected_value(setting: str, words: str):
    with pytest.raises(ConfigError) as caught:
        load_set(setting)
    assert str(caught.value).startswith(words)


def test_an_error_in_the_file_names_the_file(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text("[router]\nprot = 1025\n")
    with pytest.raises(ConfigError, match=r"cluster\.toml: router\.prot: unknown key; did you mean router\.port\?"):
        load_config(file)


@pytest.mark.parametrize("content", ["node = 5\n", "[node\n", "node.x\n", "[[node]]\nx = 1\n"])
def test_an_invalid_file_is_refused(tmp_path: Path, content: str):
    file = tmp_path / "cluster.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"cluster\.toml: "):
        load_config(file)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(tmp_path / "bin.toml")


def test_a_relative_model_path_is_relative_to_the_file(tmp_path: Path):
    (tmp_path / "cluster.toml").write_text('[model]\npath = "models/a.gguf"\n')
    assert load_config(tmp_path / "cluster.toml").model.path == str(tmp_path / "models" / "a.gguf")
    (tmp_path / "cluster.toml").write_text('[model]\npath = "/elsewhere/a.gguf"\n')
    assert load_config(tmp_path / "cluster.toml").model.path == "/elsewhere/a.gguf"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x = " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b"[timers]\nheartbeat_s = " + b"9" * 5000, "not TOML"),
        (b'[node]\n"a\\nb" = 1', r"node\.a\\nb: unknown key"),
        (b'["a\\nb"]', r"\[a\\nb\]: unknown section"),
    ],
)
def test_a_file_that_crashes_the_toml_parser_is_one_line_of_error(tmp_path: Path, content: bytes, words: str):
    file = tmp_path / "cluster.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)


def test_an_impossible_path_is_one_line_of_error():
    with pytest.raises(ConfigError, match=r"no\\x00where"):
        load_config(Path("no\0where"))


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000 + "]" * 5000])
def test_an_override_that_crashes_the_toml_parser_is_quoted_in_short(value: str):
    with pytest.raises(ConfigError, match=r"node\.threads: expected") as caught:
        load_config(None, [parse_override(f"node.threads={value}")])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "setting",
    [
        "router.workers=1025",
        "serve.prefill=100000",
        "node.threads=9007199254740992",
        "node.kv_cache_bytes=99999999999999999999",
        "router.body_timeout_s=inf",
        "serve.stop_timeout_s=1e308",
        "node.staging_slots=9007199254740992",
        "limits.control_high_water=2147483648",
        "limits.header_max_bytes=1",
        "limits.job_token_ids_max_bytes=10239",
        "timers.link_timeout_s=2147484",
        "timers.heartbeat_s=1e-300",
        "timers.retain_s=1e308",
        'prefill.name="a\\nb"',
        'model.name="\\u0000"',
        'router.host="\\n"',
        f"decode.bind={'k' * 70_000}",
    ],
)
def test_absurd_values_are_refused_in_one_short_line(setting: str):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [parse_override(setting)])
    text = str(caught.value)
    assert text.startswith(setting.partition("=")[0] + ": ")
    assert text.isprintable()
    assert len(text) < 250
