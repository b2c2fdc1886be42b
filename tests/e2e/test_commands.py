"""The commands as a user types them, against the running cluster: output, JSON, exit codes, one line of error."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.e2e.conftest import Reference
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.serve import Served
from tests.support.tiny_llama import random_prompt

pytestmark = pytest.mark.e2e
PROMPT = random_prompt(31, 12, VOCAB_SIZE)
DEADLINE_S = 120.0


def kvferry(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run(
        (sys.executable, "-m", "kvferry.ops.cli.main", *words),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def infer(served: Served, *words: str) -> "subprocess.CompletedProcess[str]":
    return kvferry("infer", "--url", served.url, "--model", "m", *words)


def ids(token_ids: list[int]) -> str:
    return ",".join(str(token_id) for token_id in token_ids)


@pytest.mark.parametrize("streamed", [(), ("--stream",)], ids=["unary", "stream"])
def test_infer_by_tokens(served: Served, reference: Reference, streamed: tuple[str, ...]) -> None:
    done = infer(served, "--tokens", ids(PROMPT), "--max-new-tokens", "8", *streamed)
    assert (done.returncode, done.stderr) == (0, "")
    expected = reference.tokens(PROMPT, 8)
    assert f"ids    {expected}" in done.stdout.splitlines()
    if streamed:
        assert done.stdout.startswith(" ".join(str(token_id) for token_id in expected))
        assert "nodes  prefill=prefill-0 decode=decode-0" in done.stdout.splitlines()
        assert "TTFT" in done.stdout


@pytest.mark.parametrize("streamed", [(), ("--stream",)], ids=["unary", "stream"])
def test_infer_as_json(served: Served, reference: Reference, streamed: tuple[str, ...]) -> None:
    done = infer(served, "--tokens", ids(PROMPT), "--max-new-tokens", "8", "--json", *streamed)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["token_ids"] == reference.tokens(PROMPT, 8)
    assert answer["total_s"] > 0
    if streamed:
        assert answer["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["nodes"] == {"prefill": "prefill-0", "decode": "decode-0"}
        assert 0 < answer["ttft_s"] <= answer["total_s"]


def test_infer_by_text(served: Served, reference: Reference) -> None:
    tokenizer = ("--tokenizer", str(reference.path))
    done = infer(served, "--text", "Hallo é", *tokenizer, "--max-new-tokens", "3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == reference.tokens(reference.encode("Hallo é"), 3)
    assert isinstance(answer["text"], str)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--tokens", "1,2,99999"), 2, "422 Input Validation Error: inputs[0].data[2]"),
        (("--tokens", "1,two"), 2, "--tokens: expected integers"),
        (("--tokens", "1", "--max-new-tokens", "none"), 2, "expected a whole number, got 'none'"),
        ((), 2, "--tokens"),
        (("--tokens", "1", "--text", "x"), 2, "not allowed with"),
        (("--text", "x", "--tokenizer", "/nowhere"), 2, "/nowhere"),
        (("--tokens", "1,2,99999", "--stream"), 2, "422 Input Validation Error: inputs[0].data[2]"),
    ],
)
def test_infer_refused(served: Served, words: tuple[str, ...], code: int, said: str) -> None:
    done = infer(served, *words)
    assert (done.returncode, done.stdout) == (code, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvferry infer: error: ")
    assert said in line


def test_infer_without_a_server(served: Served) -> None:
    unknown = kvferry("infer", "--url", served.url, "--model", "other", "--tokens", "1")
    assert unknown.returncode == 2
    assert "404 NotFoundError" in unknown.stderr
    done = kvferry("infer", "--url", "http://127.0.0.1:9", "--model", "m", "--tokens", "1")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


def test_version_and_no_command() -> None:
    version = kvferry("--version")
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith("kvferry ")
    for words in ((), ("nonsense",)):
        wrong = kvferry(*words)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert len(wrong.stderr.splitlines()) == 1


def test_doctor() -> None:
    done = kvferry("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    findings = json.loads(done.stdout)
    assert {"python", "memory", "zeromq", "small model"} <= {finding["what"] for finding in findings}
    assert all({"what", "ok", "detail"} == set(finding) for finding in findings)
    assert kvferry("doctor").returncode == 0


def test_printed_configuration_can_be_used_again(tmp_path: Path) -> None:
    first = kvferry("serve", "--port", "0", "--set", "node.block_size=32", "--print-config")
    assert (first.returncode, first.stderr) == (0, "")
    config = tomllib.loads(first.stdout)
    assert (config["router"]["port"], config["node"]["block_size"]) == (0, 32)
    file = tmp_path / "cluster.toml"
    file.write_text(first.stdout)
    for command in ("serve", "router", "prefill", "decode", "colocated"):
        again = kvferry(command, "--config", str(file), "--print-config")
        assert (again.returncode, again.stdout) == (0, first.stdout)
