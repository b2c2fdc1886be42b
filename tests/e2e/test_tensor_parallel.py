"""A split cluster whose nodes are two ranks each: the tokens of one rank, and what happens when a rank dies."""

from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.conftest import Reference, Serve
from tests.support.cluster import tokens_of
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.node_watch import NodeWatch
from tests.support.processes import has_ended
from tests.support.raw_stream import RawRequest
from tests.support.serve import Served, wait_until
from tests.support.tiny_llama import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NODES = ("prefill-0", "decode-0")
LONG = 200
PROMPT = random_prompt(21, 60, VOCAB_SIZE)


@pytest.fixture(scope="module")
def cluster(serve: Serve) -> Iterator[Served]:
    settings = {
        "node.tensor_parallel": 2,
        "node.steps_in_flight": 2,
        "serve.restart_min_s": 0.1,
        "node.kv_cache_bytes": 16 << 20,
    }
    with serve(workers=1, settings=settings) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def whole(cluster: Served) -> Iterator[None]:
    """Afterwards: ready, with one other rank a node and nothing held."""
    yield
    wait_until(lambda: {*cluster.children()} == {"proxy", "router", *NODES}, "every child runs", 120.0)
    wait_until(cluster.is_ready, "it is ready again", 120.0)
    assert [len(ranks(cluster.node(name))) for name in NODES] == [1, 1]
    with NodeWatch(cluster.members_endpoint()) as watch:
        watch.wait_idle(*NODES)


def ranks(node: psutil.Process) -> list[psutil.Process]:
    """A node's other ranks."""
    return [child for child in node.children() if "kvferry.common.ranks.agent" in child.cmdline()]


def ask(cluster: Served, prompt: list[int], count: int) -> list[int]:
    with RawRequest(cluster, prompt, streamed=True, max_new_tokens=count) as request:
        assert request.status() == 200
        return tokens_of(request.events())


def test_what_two_ranks_compute_and_transfer_continues_as_on_one(cluster: Served, reference: Reference) -> None:
    """The second prompt begins as the first one, whose KV both nodes keep; the third is longer than a step."""
    first = random_prompt(3, 45, VOCAB_SIZE)
    for prompt in (first, first[:32] + random_prompt(4, 20, VOCAB_SIZE), random_prompt(5, 700, VOCAB_SIZE)):
        assert ask(cluster, prompt, 12) == reference.tokens(prompt, 12)


@pytest.mark.parametrize(("name", "which"), [("prefill-0", "other"), ("decode-0", "first"), ("decode-0", "other")])
def test_a_rank_is_killed_under_a_stream(cluster: Served, reference: Reference, name: str, which: str) -> None:
    """Whichever it is, the whole node ends, is started again, and the stream continues."""
    node = cluster.node(name)
    (other,) = ranks(node)
    with RawRequest(cluster, PROMPT, streamed=True, max_new_tokens=LONG) as request:
        assert request.status() == 200
        events = request.events(20)
        (node if which == "first" else other).kill()
        wait_until(lambda: has_ended(node) and has_ended(other), "both ranks end")
        events += request.events()
    assert tokens_of(events) == reference.tokens(PROMPT, LONG)
    assert events[-1]["finish_reason"] == "length"
    wait_until(lambda: name in cluster.children() and cluster.node(name).pid != node.pid, f"{name} is started again")
