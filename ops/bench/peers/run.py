"""Runs the installed peers on the same cases, each in its own process, and reports why a peer could not run."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from kvferry.common.base.errors import ConfigError
from kvferry.common.base.python_command import python_command
from kvferry.ops.bench.peers.child import PACKAGES
from kvferry.ops.bench.peers.gguf_copy import copy_gguf
from kvferry.ops.bench.peers.spec import PeerTask, PeerTimes

_FIND_S = 60.0
_MEASURE_S = 1800.0
_LONGEST_REASON = 300
_GGUF_KINDS = {
    ("llamacpp", "bfloat16"): "BF16",
    ("llamacpp", "float32"): "F32",
    # Its reader does not support bfloat16 weights; it computes in bfloat16 nevertheless.
    ("openvino", "bfloat16"): "F16",
}


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """A peer's times, or the reason why there are none."""

    name: str
    times: PeerTimes | None
    error: str = ""


def installed(pythons: Sequence[str]) -> dict[str, str]:
    """Peer -> the first of these interpreters that has it. Raises ConfigError for an interpreter that does not run."""
    found: dict[str, str] = {}
    for python in pythons:
        try:
            done = _run(python, ["--find"], _FIND_S)
            names = json.loads(done.stdout) if done.returncode == 0 else None
        except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError):
            names = None
        if names is None:
            raise ConfigError(f"--peer-python: {python} is not a Python interpreter that runs here")
        found = dict.fromkeys(names, python) | found
    return found


def measure_peers(task: PeerTask, found: Mapping[str, str], progress: bool) -> list[PeerOutcome]:
    """Measure every known peer, in a fixed order, with the interpreter that has it."""
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-peers-") as work,
        tqdm(PACKAGES, desc="peers", unit="peer", disable=not progress) as bar,
    ):
        for name in bar:
            python = found.get(name)
            outcomes.append(
                PeerOutcome(name, None, "not installed") if python is None
                else measure_peer(name, python, task, Path(work))
            )  # fmt: skip
    return outcomes


def measure_peer(name: str, python: str, task: PeerTask, work: Path) -> PeerOutcome:
    """Measure one peer. `work`: directory for copies of the model in the types that peers need."""
    try:
        own = _with_own_weights(name, task, work)
    except ConfigError as error:
        return PeerOutcome(name, None, str(error))
    out = work / f"{name}.json"
    words = ["--peer", name, "--task", own.to_json(), "--out", str(out), "--started", str(time.time())]
    try:
        done = _run(python, words, _MEASURE_S, task.threads)
    except subprocess.TimeoutExpired:
        return PeerOutcome(name, None, f"not finished after {_MEASURE_S:g} s")
    if not out.exists():
        return PeerOutcome(name, None, _reason(done))
    result = json.loads(out.read_text(encoding="utf-8"))
    if "error" in result:
        return PeerOutcome(name, None, result["error"][:_LONGEST_REASON])
    return PeerOutcome(name, PeerTimes(**result))


def _with_own_weights(name: str, task: PeerTask, work: Path) -> PeerTask:
    """The task with the weights in a form that the peer reads and computes with in the task's precision."""
    if name == "transformers":
        return task
    kind = _GGUF_KINDS.get((name, task.dtype))
    if kind is None:
        raise ConfigError(f"does not support {task.dtype}")
    source = Path(task.model)
    if source.is_dir():
        raise ConfigError("reads only GGUF files; name one with --model")
    target = work / f"model-{kind}.gguf"
    if not target.exists():
        copy_gguf(source, target, kind)
    return replace(task, model=str(target))


def _run(python: str, words: Sequence[str], timeout_s: float, threads: int = 1) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    command = python_command("kvferry.ops.bench.peers.child", *words, python=python)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)


def _reason(done: "subprocess.CompletedProcess[str]") -> str:
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    return lines[-1][:_LONGEST_REASON] if lines else f"exit code {done.returncode}"
