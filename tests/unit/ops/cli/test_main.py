"""Exit codes, and one line on stderr in place of a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.common.base.errors import (
    ConfigError,
    DeviceUnavailableError,
    KvferryError,
    ModelLoadError,
    RequestInvalidError,
    UnavailableError,
)
from kvferry.common.config.load import load_config
from kvferry.ops.cli.errors import report
from kvferry.ops.cli.main import build_parser, main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(list(argv))
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--port", "70000"], "router.port: expected integer from 0 to 65535, got 70000"),
        (["serve", "--prefill", "-1"], "serve.prefill: expected integer, at least 0, got -1"),
        (["serve", "--prefill", "0"], "serve.prefill: expected at least 1 when serve.colocated is 0, got 0"),
        (["serve", "--decode", "0"], "serve.decode: expected at least 1 when serve.colocated is 0, got 0"),
        (["colocated"], "--config"),
        (["serve", "--dtype", "float16"], "--dtype"),
        (["serve", "--set", "node.block_sizes=1"], "did you mean node.block_size?"),
        (["serve", "--set", "node"], "expected section.key=value"),
        (["serve", "--model-name", "a/b"], "slash"),
        (["serve", "--config", "/no/such/file"], "cannot read"),
        (["router"], "--config"),
        (["prefill", "--config", "/no/such/file"], "cannot read"),
        (["decode"], "--config"),
        (["infer", "--model", "m"], "--tokens"),
        (["infer", "--model", "m", "--tokens", "1", "--text", "a"], "not allowed with"),
        (["infer", "--model", "m", "--tokens", "1,a"], "--tokens: expected integers"),
        (["infer", "--model", "m", "--tokens", "1,-1"], "--tokens: expected ids from 0 to 4294967295, got -1"),
        (["infer", "--model", "m", "--tokens", f"{2**70}"], "--tokens: expected ids from 0 to 4294967295, got 118"),
        (["infer", "--model", "m", "--tokens", "1", "--chat"], "kvferry infer: error: --chat requires --text"),
        (
            ["infer", "--model", "m", "--tokens", "1", "--top-k", "0"],
            "argument --top-k: expected a whole number",
        ),
        (["infer", "--model", "m", "--tokens", "1", "--no-do-sample", "--top-p", "1"], "--top-p: has no effect with"),
        (["infer", "--model", "m", "--tokens", "1", "--url", "127.0.0.1:1025"], "--url: expected http://host:port"),
        (["demo", "--max-new-tokens", "0"], "argument --max-new-tokens: expected a whole number from 1 to"),
        (["bench", "engine", "--peer-python", "python3"], "--peer-python requires --peers"),
        (["serve", "--bogus"], "kvferry serve: error: unrecognized arguments: --bogus (see kvferry serve --help)"),
        (["bench", "engine", "--bogus"], "kvferry bench engine: error: unrecognized arguments: --bogus"),
        (["bench", "engine", "--tp", "0"], "kvferry bench engine: error: argument --tp: expected at least 1, got 0"),
        (["bench", "engine", "--threads", "0"], "argument --threads: expected at least 1, got 0"),
        (["bench", "engine", "--threads", "x"], "argument --threads: expected a whole number, got 'x'"),
        (["bench", "perplexity", "--tokens", "1"], "argument --tokens: expected at least 2, got 1"),
        (["bench", "perplexity", "--threads", "-1"], "argument --threads: expected at least 1, got -1"),
        (["bench", "serve", "--model", "m", "--rate", "x"], "argument --rate: expected a number, got 'x'"),
        (["keys", "public", "/no/such/file"], "kvferry keys public: error: FILE: /no/such/file"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert words in err
    assert err.startswith("kvferry")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("serve", "--model"), "model.path"),
        (("infer", "--model", "m", "--text", "a", "--tokenizer"), "--tokenizer"),
        (("bench", "engine", "--model"), "--model"),
        (("bench", "perplexity", "--model"), "--model"),
    ],
)
def test_a_missing_path_is_a_usage_error(capsys, tmp_path: Path, monkeypatch, words, option):
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.setenv(variable, "1")
    missing = tmp_path / "none"
    assert main([*words, str(missing)]) == 2
    out, err = capsys.readouterr()
    command = " ".join(words[: 2 if words[0] == "bench" else 1])
    assert (out, err) == ("", f"kvferry {command}: error: {option}: {missing} does not exist\n")


def test_a_path_without_a_model_is_rejected_before_the_start(capsys, tmp_path: Path, monkeypatch):
    started: list[object] = []
    monkeypatch.setattr("kvferry.ops.launcher.serve.serve", started.append)
    code, out, err = run(capsys, "serve", "--model", str(tmp_path))
    assert (code, out, started) == (2, "", [])
    assert err == f"kvferry serve: error: config.json is missing in {tmp_path}\n"


def test_a_bug_prints_a_traceback_only_in_debug_mode(capsys, monkeypatch):
    monkeypatch.delenv("KVFERRY_DEBUG", raising=False)
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError as error:
        caught = error
    assert report(caught, "kvferry serve", debug=False) == 1
    err = capsys.readouterr().err
    assert err.startswith("kvferry serve: error: RuntimeError: two lines (")
    assert err.count("\n") == 1
    assert report(caught, "kvferry serve", debug=True) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("KVFERRY_DEBUG", "1")
    report(caught, "kvferry serve", debug=False)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("a.b: wrong"), 2, "a.b: wrong"),
        (ModelLoadError("m: no config.json"), 2, "m: no config.json"),
        (DeviceUnavailableError("no cuda"), 2, "no cuda"),
        (RequestInvalidError("422 too long"), 2, "422 too long"),
        (KvferryError("no"), 1, "no"),
        (UnavailableError("503 no node"), 1, "503 no node"),
        (ExceptionGroup("g", [ConfigError("inner")]), 2, "inner"),
        (ExceptionGroup("g", [KvferryError("inner")]), 1, "inner"),
    ],
)
def test_exit_code_and_text_of_each_error(capsys, error, code, text):
    assert report(error, "kvferry x", debug=False) == code
    assert capsys.readouterr().err == f"kvferry x: error: {text}\n"


def test_an_interrupt_is_not_an_error(capsys):
    assert report(KeyboardInterrupt(), "kvferry demo", debug=False) == 1
    assert capsys.readouterr().err == "kvferry demo: interrupted\n"


def test_version_is_printed(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("kvferry ")


def test_printed_configuration_has_flags_and_settings_and_works_as_a_file(capsys, tmp_path: Path):
    flags = ["--port", "7", "--workers", "3", "--model", "m.gguf", "--dtype", "float32", "--prefill", "2"]
    code, out, err = run(capsys, "serve", *flags, "--set", "router.port=8", "--set", "node.threads=1", "--print-config")
    assert (code, err) == (0, "")
    file = tmp_path / "printed.toml"
    file.write_text(out)
    config = load_config(file)
    assert (config.router.port, config.router.workers, config.serve.prefill, config.node.threads) == (8, 3, 2, 1)
    assert config.model.path == str(Path("m.gguf").absolute())
    for command in ("router", "prefill", "decode", "colocated"):
        assert run(capsys, command, "--config", str(file), "--print-config") == (0, out, "")


def test_every_command_has_help(capsys):
    parser = build_parser()
    for command in ("serve", "router", "prefill", "decode", "colocated", "infer", "doctor", "demo"):
        with pytest.raises(SystemExit) as end:
            parser.parse_args([command, "--help"])
        assert end.value.code == 0
        assert "--" in capsys.readouterr().out


def test_the_command_line_imports_no_heavy_packages():
    heavy = {"torch", "numpy", "zmq", "falcon", "httpx", "tokenizers", "jinja2", "transformers"}
    code = f"import sys, kvferry.ops.cli.main; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_closed_pipe_is_not_an_error():
    command = [sys.executable, "-m", "kvferry.ops.cli.main", "serve", "--print-config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
