"""Nodes that run both roles: the same tokens as split ones, nothing transferred, and next to split ones in one
cluster."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.cluster.node_core import NodeCore
from kvferry.router.core import placer as planner
from kvferry.router.policy.placement import Choice, choose
from tests.cluster.conftest import MakeCluster
from tests.support.cluster import Cluster, tokens_of
from tests.support.eventually import eventually
from tests.support.timers import FAST
from tests.support.tiny_llama import random_prompt, reference_tokens

Reference = tuple[Path, Any]
PROMPTS = [random_prompt(seed, 1 + 13 * seed) for seed in range(12)]


def has_received_kv(core: NodeCore) -> bool:
    """Whether some prefill node is a client here."""
    return any(client.kind == "prefill" for client in core.clients.clients.values())


async def all_answers(c: Cluster) -> list[list[int]]:
    return list(await asyncio.gather(*(c.generate(prompt, max_new_tokens=9) for prompt in PROMPTS)))


@pytest.mark.asyncio
@pytest.mark.parametrize("scheme", ["inproc", "ipc", "tcp"])
async def test_one_node_is_a_whole_cluster(cluster: MakeCluster, reference: Reference, scheme: str) -> None:
    prompt = random_prompt(2, 50)
    async with cluster(prefill=0, decode=0, colocated=1, scheme=scheme) as c:
        events = await c.stream(prompt, max_new_tokens=10)
        assert tokens_of(events) == reference_tokens(reference[1], prompt, 10)
        assert events[-1]["nodes"] == {"prefill": "colocated-0", "decode": "colocated-0"}
        assert not await c.nodes["colocated-0"].ask(has_received_kv)


@pytest.mark.asyncio
async def test_many_immediately_are_as_on_split_nodes(cluster: MakeCluster, reference: Reference) -> None:
    async with cluster(prefill=1, decode=1) as c:
        split = await all_answers(c)
    async with cluster(prefill=0, decode=0, colocated=2, max_step_tokens=8, max_running=8) as c:
        assert await all_answers(c) == split
        assert not any([await node.ask(has_received_kv) for node in c.nodes.values()])
    assert split == [reference_tokens(reference[1], prompt, 9) for prompt in PROMPTS]


@pytest.mark.asyncio
async def test_next_to_split_nodes(cluster: MakeCluster, reference: Reference) -> None:
    async with cluster(colocated=1) as c:
        streams = await asyncio.gather(*(c.stream(prompt, max_new_tokens=9) for prompt in PROMPTS))
    for prompt, events in zip(PROMPTS, streams, strict=True):
        assert tokens_of(events) == reference_tokens(reference[1], prompt, 9)
    pairs = {tuple(events[-1]["nodes"].values()) for events in streams}
    assert ("colocated-0", "colocated-0") in pairs
    assert any(prefill == "prefill-0" for prefill, _ in pairs)
    assert not any(prefill == "colocated-0" and decode != "colocated-0" for prefill, decode in pairs)


@pytest.mark.rule(6)
@pytest.mark.asyncio
async def test_two_of_them_are_one_anothers_clients(
    cluster: MakeCluster, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type of a message shows which way it goes: both processes have a link to the other and a client there."""

    def elsewhere(*nodes: Any, **named: Any) -> Choice | None:
        choice = choose(*nodes, **named)
        if choice is None:
            return None
        return Choice(choice.prefill, tuple(peer for peer in choice.decodes if peer != choice.prefill))

    monkeypatch.setattr(planner, "choose", elsewhere)
    async with cluster(prefill=0, decode=0, colocated=2) as c:
        streams = await asyncio.gather(*(c.stream(prompt, max_new_tokens=9) for prompt in PROMPTS))
        assert all([await node.ask(has_received_kv) for node in c.nodes.values()])
    for prompt, events in zip(PROMPTS, streams, strict=True):
        assert tokens_of(events) == reference_tokens(reference[1], prompt, 9)
    assert {tuple(events[-1]["nodes"].values()) for events in streams} == {
        ("colocated-0", "colocated-1"),
        ("colocated-1", "colocated-0"),
    }


@pytest.mark.asyncio
async def test_it_dies_mid_stream(cluster: MakeCluster, reference: Reference) -> None:
    prompt = random_prompt(11, 30)
    expected = reference_tokens(reference[1], prompt, 40)
    async with cluster(prefill=0, decode=0, colocated=2, timers=FAST) as c:
        for node in c.nodes.values():
            node.pauses.arm("before_step")
        answer = asyncio.create_task(c.stream(prompt, max_new_tokens=40))
        await eventually(lambda: any(n.pauses.is_reached("before_step") for n in c.nodes.values()), "its prompt")
        serving = next(node for node in c.nodes.values() if node.pauses.is_reached("before_step"))
        serving.pauses.arm("after_step")
        serving.pauses.release("before_step")
        await eventually(lambda: serving.pauses.is_reached("after_step"), "its first token")
        serving.pauses.arm("before_step")
        serving.pauses.release("after_step")
        await eventually(lambda: any(r.decode is not None for r in c.service.core.requests.values()), "it decodes")
        c.kill(serving.name)
        for node in c.nodes.values():
            node.pauses.release_all()
        events = await answer
    assert tokens_of(events) == expected
    assert events[-1]["nodes"]["decode"] != serving.name


@pytest.mark.asyncio
@pytest.mark.parametrize("nodes", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "colocated": 1}])
async def test_prefix_hits_are_seen_in_usage_and_metrics(cluster: MakeCluster, nodes: dict[str, int]) -> None:
    prompt = random_prompt(12, 40)
    async with cluster(**nodes) as c:
        first = await c.stream(prompt, max_new_tokens=4)
        assert first[-1]["usage"]["cached_tokens"] == 0
        again = await c.stream(prompt, max_new_tokens=4)
        assert again[-1]["usage"]["cached_tokens"] == 36  # whole blocks of 4 before the last id, which is computed
        await eventually(
            lambda: c.service.counts().prefix_hit_rate.get("tiny", 0.0) > 0.4, "the published loads show it"
        )
        text = (await c.http.get("/metrics")).text
    (line,) = [line for line in text.splitlines() if "prefix" in line and not line.startswith("#")]
    assert float(line.rsplit(" ", 1)[1]) > 0.4
