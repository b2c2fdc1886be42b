"""`kvferry serve --colocated 2`: processes that run both roles, one of which is killed under a stream."""

from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.cluster import tokens_of
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.node_watch import NodeWatch
from tests.support.raw_stream import RawRequest
from tests.support.serve import Served, wait_until
from tests.support.tiny_llama import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NODES = ("colocated-0", "colocated-1")
PROMPT = random_prompt(21, 60, VOCAB_SIZE)
LONG = 2000
"""Tokens of a stream that is still running when its node dies, as a rule."""
TRIES = 4
"""On a busy machine a stream may be over before its node is killed, which says nothing."""


def test_a_node_is_killed_under_a_stream(serve: Serve) -> None:
    """The other one continues it; the tokens are those of an undisturbed run."""
    settings = {"router.max_iter_times": LONG, "serve.restart_min_s": 0.1, "timers.heartbeat_s": 0.1}
    with (
        serve(prefill=0, decode=0, colocated=2, settings=settings) as cluster,
        NodeWatch(cluster.members_endpoint()) as watch,
    ):
        assert {*cluster.children()} == {"proxy", "router", *NODES}
        with RawRequest(cluster, PROMPT, streamed=True, max_new_tokens=LONG) as request:
            assert request.status() == 200
            undisturbed = request.events()
        assert undisturbed[-1]["nodes"]["prefill"] == undisturbed[-1]["nodes"]["decode"]
        watch.wait_idle(*NODES)
        for _ in range(TRIES):
            killed, events = stream_whose_node_is_killed(cluster, watch)
            assert tokens_of(events) == tokens_of(undisturbed)
            assert events[-1]["finish_reason"] == "length"
            if events[-1]["nodes"]["decode"] != killed:
                break
        (other,) = {*NODES} - {killed}
        assert events[-1]["nodes"] == {"prefill": other, "decode": other}


def stream_whose_node_is_killed(cluster: Served, watch: NodeWatch) -> tuple[str, list[dict[str, Any]]]:
    """The node, and the events of the stream. The node is back, and nothing runs any more."""
    processes = {name: cluster.node(name) for name in NODES}
    with RawRequest(cluster, PROMPT, streamed=True, max_new_tokens=LONG) as request:
        assert request.status() == 200
        events = request.events(20)
        wait_until(lambda: len(busy(watch)) == 1, "one of the nodes runs it")
        (serving,) = busy(watch)
        processes[serving].kill()
        events += request.events()
    pid = processes[serving].pid
    wait_until(lambda: serving in cluster.children() and cluster.node(serving).pid != pid, "it starts again")
    wait_until(cluster.is_ready, "it is ready again", 120.0)
    watch.wait_idle(*NODES)
    return serving, events


def busy(watch: NodeWatch) -> list[str]:
    """Nodes with a request that runs."""
    return [name for name, view in watch.views().items() if view.load.running_requests]
