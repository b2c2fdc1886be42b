"""Nodes that die, stop and come back; clients that leave; deadlines: what the client sees, and that nothing is left."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.common.config.protocol import Limits
from tests.cluster.conftest import MakeCluster
from tests.support.cluster import Cluster, tokens_of
from tests.support.eventually import eventually
from tests.support.timers import FAST, PATIENT
from tests.support.tiny_llama import random_prompt, reference_tokens

Reference = tuple[Path, Any]


async def wait_for_tokens(c: Cluster, count: int) -> None:
    """Until some request holds that many tokens."""
    await eventually(
        lambda: any(request.next_index >= count for request in c.service.core.requests.values()), f"{count} tokens"
    )


@pytest.mark.rule(32)
@pytest.mark.asyncio
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 11, "temperature": 1.3, "top_k": 50}])
@pytest.mark.parametrize("scheme", ["inproc", "tcp"])
async def test_decode_dies_mid_stream(cluster: MakeCluster, scheme: str, sampling: dict[str, Any]) -> None:
    prompt = random_prompt(1, 30)
    async with cluster(decode=2, scheme=scheme, timers=FAST) as c:
        undisturbed = tokens_of(await c.stream(prompt, max_new_tokens=40, **sampling))
        for node in c.nodes.values():
            if node.role == "decode":
                node.pauses.arm("after_step")
        stream = asyncio.create_task(c.stream(prompt, max_new_tokens=40, **sampling))
        await eventually(
            lambda: any(n.role == "decode" and n.pauses.is_reached("after_step") for n in c.nodes.values()), "decoding"
        )
        serving = next(n for n in c.nodes.values() if n.role == "decode" and n.pauses.is_reached("after_step"))
        c.kill(serving.name)
        for node in c.nodes.values():
            node.pauses.release_all()
        events = await stream
        assert tokens_of(events) == undisturbed
        assert events[-1]["nodes"]["decode"] != serving.name


@pytest.mark.asyncio
async def test_prefill_dies_while_it_computes(cluster: MakeCluster, reference: Reference) -> None:
    prompt = random_prompt(2, 60)
    async with cluster(prefill=2, timers=FAST) as c:
        for node in c.nodes.values():
            if node.role == "prefill":
                node.pauses.arm("before_step")
        answer = asyncio.create_task(c.generate(prompt, max_new_tokens=8))
        await eventually(
            lambda: any(n.role == "prefill" and n.pauses.is_reached("before_step") for n in c.nodes.values()), "compute"
        )
        serving = next(n for n in c.nodes.values() if n.role == "prefill" and n.pauses.is_reached("before_step"))
        for node in c.nodes.values():
            if node is not serving:
                node.pauses.release_all()
        c.kill(serving.name)
        assert await answer == reference_tokens(reference[1], prompt, 8)


@pytest.mark.asyncio
async def test_node_comes_back_at_the_same_address(cluster: MakeCluster, reference: Reference) -> None:
    """Its death shows in the connection: the timers need not be fast, and a slow machine makes no 503 of its own."""
    prompt = random_prompt(3, 25)
    async with cluster(scheme="ipc", timers=replace(PATIENT, new_request_wait_s=0.4)) as c:
        await c.generate(prompt, max_new_tokens=4)
        for name in ("decode-0", "prefill-0"):
            old = c.kill(name)
            await eventually(lambda: c.service.not_ready_reason("tiny") is not None, f"{name} is missed")
            assert (await c.infer(prompt))["status"] == 503
            c.add_node(name, old.role, bind=old.shell.endpoint)
            await eventually(lambda: c.service.not_ready_reason("tiny") is None, f"{name} is back")
            assert await c.generate(prompt, max_new_tokens=6) == reference_tokens(reference[1], prompt, 6)


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_timeout_frees_everything(cluster: MakeCluster, role: str) -> None:
    async with cluster(timers=FAST) as c:
        node = c.nodes[f"{role}-0"]
        node.pauses.arm("before_step")
        answer = await c.infer(random_prompt(4, 40), max_new_tokens=50, timeout=1)
        assert answer["status"] == 408
        assert answer["error_type"] == "Request Timeout"
        node.pauses.release_all()


@pytest.mark.asyncio
@pytest.mark.parametrize("held", ["prefill", "decode"])
async def test_client_that_leaves_frees_everything(cluster: MakeCluster, held: str) -> None:
    async with cluster(timers=FAST) as c:
        node = c.nodes[f"{held}-0"]
        node.pauses.arm("before_step")
        request = asyncio.create_task(c.infer(random_prompt(5, 40), max_new_tokens=50))
        await eventually(lambda: node.pauses.is_reached("before_step"), "the engine stands")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        node.pauses.release_all()


@pytest.mark.asyncio
async def test_engine_failure_ends_the_node_and_not_the_request(cluster: MakeCluster, reference: Reference) -> None:
    prompt = random_prompt(6, 30)
    async with cluster(decode=2, timers=FAST) as c:
        decodes = [node for node in c.nodes.values() if node.role == "decode"]
        for node in decodes:
            node.pauses.arm("before_step")
        answer = asyncio.create_task(c.generate(prompt, max_new_tokens=8))
        await eventually(lambda: any(n.pauses.is_reached("before_step") for n in decodes), "decoding")
        failing = next(node for node in decodes if node.pauses.is_reached("before_step"))
        failing.pauses.fail_with = RuntimeError("the device is gone")
        for node in decodes:
            node.pauses.release_all()
        await eventually(lambda: failing.ended is not None, "a node ends by its engine")
        assert failing.ended is not None
        assert failing.ended.code == 1
        c.dead.append(c.nodes.pop(failing.name))
        assert await answer == reference_tokens(reference[1], prompt, 8)


@pytest.mark.asyncio
@pytest.mark.parametrize("num_host_blocks", [0, 200], ids=["without host memory", "with host memory"])
async def test_full_decode_side_queues_and_nothing_is_lost(
    cluster: MakeCluster, reference: Reference, num_host_blocks: int
) -> None:
    """Many more requests than the decode blocks can hold immediately; those that fit are there before the first
    step."""
    prompts = [random_prompt(seed, 60) for seed in range(20)]
    options = {"num_blocks": 132, "num_host_blocks": num_host_blocks}
    async with cluster(limits=Limits(max_preemptions=50, watermark_blocks_share=0.0), **options) as c:
        node = c.nodes["decode-0"]
        node.pauses.arm("before_step")
        asked = asyncio.gather(*(c.generate(prompt, max_new_tokens=30) for prompt in prompts))
        await c.until(node, lambda core: core.scheduler.load().free_blocks < 60 / c.options.block_size, "is full")
        node.pauses.release_all()
        answers = await asked
        load = await node.ask(lambda core: core.scheduler.load())
        assert (load.swaps > 0) == (num_host_blocks > 0)
        assert load.preemptions > 0 or num_host_blocks > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference_tokens(reference[1], prompt, 30)


@pytest.mark.asyncio
async def test_drained_node_finishes_its_requests(cluster: MakeCluster, reference: Reference) -> None:
    prompt = random_prompt(7, 30)
    async with cluster(prefill=2, decode=2, timers=FAST) as c:
        task = asyncio.create_task(c.generate(prompt, max_new_tokens=60))
        await wait_for_tokens(c, 1)
        for name in ("prefill-0", "decode-0"):
            c.nodes[name].shell.drain()
        assert await task == reference_tokens(reference[1], prompt, 60)
        await eventually(
            lambda: all(c.nodes[name].ended is not None for name in ("prefill-0", "decode-0")), "drained nodes end"
        )
        for name in ("prefill-0", "decode-0"):
            node = c.nodes.pop(name)
            assert node.ended is not None
            assert node.ended.reason == "drained"
            c.dead.append(node)
        assert await c.generate(prompt, max_new_tokens=5) == reference_tokens(reference[1], prompt, 5)
