"""`kvferry bench serve` against a real cluster: every token is counted, errors are one line."""

import json
import subprocess

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.test_commands import kvferry
from tests.support.serve import Served, wait_until

pytestmark = pytest.mark.e2e


def bench(served: Served, *words: str, model: str = MODEL) -> "subprocess.CompletedProcess[str]":
    sizes = ("--input-len", "20", "--output-len", "9")
    return kvferry("bench", "serve", "--url", served.url, "--model", model, *sizes, *words)


@pytest.mark.parametrize("shape", [("--concurrency", "3"), ("--rate", "20")], ids=["closed", "poisson"])
def test_a_cluster_is_measured(served: Served, shape: tuple[str, ...]) -> None:
    before = served.metrics()["request_success_total"]
    done = bench(served, *shape, "--requests", "8", "--warmup", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["api"], report["completed"], report["failed"], report["errors"]) == ("infer", 8, 0, {})
    assert (report["output_tokens"], report["tokens_counted_by"], report["short"]) == (72, "ids", 0)
    assert report["warmup_requests"] == 3
    # A request is counted after its answer's last byte.
    wait_until(lambda: served.metrics()["request_success_total"] - before == 11, "every request is counted")
    assert 0 < report["ttft_ms"]["p50"] <= report["e2e_ms"]["p50"]
    assert report["first_gap_ms"]["max"] > 0  # a small model's second token may come with the first
    assert report["itl_ms"]["max"] > 0
    assert report["output_tok_s"] == pytest.approx(72 / report["duration_s"], rel=0.01)


def test_a_table_for_people(served: Served) -> None:
    done = bench(served, "--requests", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 completed, 0 failed" in done.stdout
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[4:9]] == [
        "first token", "first to second", "between tokens", "per token of a request", "whole request",
    ]  # fmt: skip


def test_what_cannot_be_measured(served: Served) -> None:
    for model, words, said in (
        ("other", (), "neither /v2/models/other nor"),
        (MODEL, ("--vocab-size", "999999"), "422 inputs[0].data"),
        (MODEL, ("--input-len", "100000"), "422 "),
        (MODEL, ("--ignore-eos",), "--ignore-eos: the token API does not support it"),
    ):
        done = bench(served, *words, model=model)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert said in line
