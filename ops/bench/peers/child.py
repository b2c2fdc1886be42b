"""One peer in a process of its own, so that its memory and threads are its own.

Run as `python -m kvferry.ops.bench.peers.child`.

Imports nothing of this project but `ops.bench.peers`, and that imports nothing but the standard library and the peer.
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

from kvferry.ops.bench.peers.spec import (
    LoadPeer,
    Peer,
    PeerTask,
    PeerTimes,
    rss_mb,
)

PACKAGES = {"transformers": "transformers", "openvino": "openvino_genai", "llamacpp": "xllamacpp"}
"""Peers by name, and the package that each is."""


def main() -> int:
    """Say which peers this interpreter has, or measure one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--find", action="store_true", help="print the names of the peers that are installed")
    parser.add_argument("--peer", choices=tuple(PACKAGES))
    parser.add_argument("--task", help="a PeerTask as JSON")
    parser.add_argument("--started", type=float, help="when this process was started, by time.time()")
    parser.add_argument("--out", type=Path, help="where the result goes; peers write to stdout what they like")
    args = parser.parse_args()
    if args.find:
        found = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    try:
        load: LoadPeer = import_module(f"kvferry.ops.bench.peers.{args.peer}_peer").load
        result = asdict(measure(load, PeerTask.from_json(args.task), args.started))
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is the reason why it has no figures
        result = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    args.out.write_text(json.dumps(result), encoding="utf-8")
    return 0


def measure(load: LoadPeer, task: PeerTask, started: float) -> PeerTimes:
    """All cases, each after one that is not counted."""
    peer = load(task)
    ready_s = time.time() - started
    prompts = _Prompts(task)
    prefill = {str(length): _prefill(peer, prompts, length, task.rounds) for length in task.prompts}
    decode = {str(batch): _decode(peer, prompts, batch, task) for batch in task.batches}
    return PeerTimes(peer.version, round(ready_s, 2), rss_mb(), prefill, decode)


class _Prompts:
    """Random prompts, none like another."""

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
