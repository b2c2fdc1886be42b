"""The cluster that is tried: a small random model or the real one, in processes whose links can be cut."""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.common.config.endpoints import with_key
from tests.chaos.launch import write_places
from tests.chaos.links import Links, parts_of
from tests.support.keys import KeyRing
from tests.support.node_watch import NodeWatch
from tests.support.serve import Served, ServeOptions, serving, wait_until

VOCAB_SIZE = 512
IDLE_S = 60.0
REAL_SETTINGS: Mapping[str, object] = {"node.kv_cache_bytes": 256 << 20, "node.threads": 1}
"""Of nodes with the small real model, so that several fit on one machine."""


@dataclass(frozen=True)
class Shape:
    """How big the cluster is."""

    model: Path
    prefill: int = 2
    decode: int = 2
    workers: int = 2
    settings: Mapping[str, object] = field(default_factory=dict)
    keys: KeyRing | None = None
    """With keys on all sockets."""
    colocated: int = 0

    @property
    def nodes(self) -> tuple[str, ...]:
        return parts_of(self.prefill, self.decode, self.colocated)[1:]


@dataclass(frozen=True)
class Testbed:
    """A cluster that serves, its links, and a look at its nodes."""

    shape: Shape
    served: Served
    links: Links
    watch: NodeWatch

    def wait_whole(self) -> None:
        """Every process runs, it serves, and nothing is held anywhere."""
        served = self.served
        wait_until(lambda: {*served.children()} == {"proxy", "router", *self.shape.nodes}, "all children run", IDLE_S)
        wait_until(lambda: len(served.workers()) == self.shape.workers, "all workers run", IDLE_S)
        wait_until(served.is_ready, "it is ready", IDLE_S)
        self.watch.wait_idle(*self.shape.nodes, deadline_s=IDLE_S)


def fill_in(args: argparse.Namespace, values: Mapping[str, float]) -> argparse.Namespace:
    """What the command line left open."""
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def tiny_model(directory: Path) -> Path:
    """A small random model, float32."""
    # Not before the command line is read: --help needs no torch.
    from tests.support.tiny_llama import make_checkpoint

    make_checkpoint(
        directory, vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    return directory


@contextlib.contextmanager
def running_testbed(shape: Shape, directory: Path, make_links: Callable[[Sequence[str]], Links]) -> Iterator[Testbed]:
    """Start it; stopped and checked by `tests.support.serve` at the end, after a Ctrl-C and after SIGTERM as well."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    parts = parts_of(shape.prefill, shape.decode, shape.colocated)
    links = make_links(parts)
    try:
        places = directory / "places.json"
        write_places(places, links.places())
        settings = {**shape.settings, **(shape.keys.settings() if shape.keys else {})}
        options = ServeOptions(
            shape.model, shape.prefill, shape.decode, shape.workers, settings, ("tests.chaos.launch", str(places)),
            colocated=shape.colocated,
        )  # fmt: skip
        with serving(options) as served, _watch(served, shape.keys) as watch:
            testbed = Testbed(shape, served, links, watch)
            testbed.wait_whole()
            yield testbed
            if sys.exc_info()[0] is None:
                testbed.wait_whole()
    finally:
        links.close()


def _watch(served: Served, keys: KeyRing | None) -> NodeWatch:
    members = served.members_endpoint()
    if keys is None:
        return NodeWatch(members)
    return NodeWatch(with_key(members, keys.public["router"].hex), keys.security("router"))


async def on_every_worker(testbed: Testbed, what: Callable[[], Awaitable[object]]) -> None:
    """Run it once with each worker taking all new connections: what is opened at first use is then no leak."""
    for worker in testbed.served.workers():
        with testbed.served.only_worker(worker):
            # It was stopped for as long as the other one was busy, and is asking its nodes who they are.
            await asyncio.to_thread(wait_until, testbed.served.is_ready, "the worker is ready", IDLE_S)
            await what()
            await asyncio.to_thread(testbed.served.metrics)
