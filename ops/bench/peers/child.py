"""Measures one peer in its own process, so that its memory and threads are separate.

Run by `ops.bench.peers.run`, in the peer's interpreter: must import nothing of this project except
`ops.bench.peers.spec` and the peer's module, which may import only the standard library and the peer's packages.
"""

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from kvferry.ops.bench.peers.spec import LoadPeer, Peer, PeerTask, PeerTimes, rss_mb

PACKAGES = {"transformers": "transformers", "openvino": "openvino_genai", "llamacpp": "xllamacpp"}
"""Peer -> the package to import."""


def main() -> int:
    """Print the peers that this interpreter has, or measure one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--find", action="store_true", help="print the names of the peers that are installed")
    parser.add_argument("--peer", choices=tuple(PACKAGES))
    parser.add_argument("--task", help="a PeerTask as JSON")
    parser.add_argument("--started", type=float, help="time.time() at the start of this process")
    parser.add_argument("--out", type=Path, help="file for the result, since peers write to stdout")
    args = parser.parse_args()
    if args.find:
        found = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    try:
        load: LoadPeer = import_module(f"kvferry.ops.bench.peers.{args.peer}_peer").load
        result = asdict(measure_cases(load, PeerTask.from_json(args.task), args.started))
    except Exception as error:  # noqa: BLE001 - reported as the reason why the peer has no figures
        result = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    args.out.write_text(json.dumps(result), encoding="utf-8")
    return 0


def measure_cases(load: LoadPeer, task: PeerTask, started: float) -> PeerTimes:
    """Load the peer and measure all cases, each after a warm-up."""
    peer = load(task)
    ready_s = time.time() - started
    prompts = _Prompts(task)
    prefill = {str(length): _prefill(peer, prompts, length, task.rounds) for length in task.prompts}
    decode = {str(batch): _decode(peer, prompts, batch, task) for batch in task.batches}
    return PeerTimes(peer.version, round(ready_s, 2), rss_mb(), prefill, decode)


class _Prompts:
    """Random prompts, all different, so that no prefix cache helps."""

    def __init__(self, task: PeerTask) -> None:
        self._draw = random.Random(task.seed)
        self._vocab_size = task.vocab_size

    def next(self, length: int) -> list[int]:
        return [self._draw.randrange(self._vocab_size) for _ in range(length)]


def _prefill(peer: Peer, prompts: _Prompts, length: int, rounds: int) -> float:
    peer.prompt(prompts.next(length))
    return statistics.median(peer.prompt(prompts.next(length)) for _ in range(rounds))


def _decode(peer: Peer, prompts: _Prompts, batch: int, task: PeerTask) -> float:
    return peer.decode([prompts.next(task.context) for _ in range(batch)], task.decode_steps)


if __name__ == "__main__":
    sys.exit(main())
