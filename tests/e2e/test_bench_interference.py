"""`python -m kvferry.ops.bench.interference` with real clusters of the tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_streams_are_measured_alone_and_with_prompts(reference: Reference, tmp_path: Path) -> None:
    """Only whole answers, all of them; and the prompts really came while the streams ran."""
    out = tmp_path / "figures.json"
    words = ["--model", str(reference.path), "--dtype", "float32", "--layout", "colocated", "--streams", "2"]
    words += ["--requests", "4", "--output-len", "200", "--prompt-len", "300", "--rate", "20", "--json", str(out)]
    command = [sys.executable, "-m", "kvferry.ops.bench.interference", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("colocated ")
    (side,) = json.loads(out.read_text())
    for name in ("alone", "disturbed"):
        assert (side[name]["completed"], side[name]["failed"], side[name]["output_tokens"]) == (4, 0, 800)
        assert side[name]["itl_ms"]["p99"] > 0
    assert side["prompts"]["completed"] > 0
    assert side["prompts"]["failed"] == 0
    assert side["prompts"]["input_len"] == 300
