"""KV through memory that the nodes share: the same tokens, and every staging slot is free again, whichever node
died."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.cluster.node_core import NodeCore
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.schema import KvTransport
from kvferry.decode_node.role import DecodeRole
from kvferry.decode_node.staging_slots import StagingSlots
from tests.cluster.conftest import MakeCluster
from tests.support.cluster import NodeThread
from tests.support.eventually import eventually
from tests.support.tiny_llama import random_prompt, reference_tokens

Reference = tuple[Path, Any]
SHM: tuple[KvTransport, ...] = ("shm", "zmq")


def staging_of(core: NodeCore) -> StagingSlots:
    return next(role.staging for role in core.roles if isinstance(role, DecodeRole))


def staged_at(node: NodeThread) -> int:
    """Pieces that came by a slot."""
    return int(node.shell._kv.counts()[1]["staged"])  # type: ignore[attr-defined]


def in_use(core: NodeCore) -> tuple[int, int]:
    """How many slots are granted, and rest."""
    return staging_of(core).num_granted, staging_of(core).num_quarantined


@pytest.mark.asyncio
@pytest.mark.parametrize("scheme", ["inproc", "tcp"])
async def test_tokens_equal_transformers(cluster: MakeCluster, reference: Reference, scheme: str) -> None:
    prompts = [random_prompt(seed, 5 + 19 * seed) for seed in range(8)]
    limits = Limits(piece_target_bytes=2048, staging_slots_per_transfer=2)
    async with cluster(scheme=scheme, kv_transports=SHM, limits=limits, decode=2) as c:
        answers = await asyncio.gather(*(c.generate(prompt, max_new_tokens=9) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == reference_tokens(reference[1], prompt, 9)
        decodes = [node for node in c.nodes.values() if node.role == "decode"]
        assert sum(staged_at(node) for node in decodes) > len(prompts)
        for node in decodes:
            assert await node.ask(in_use) == (0, 0)


@pytest.mark.asyncio
async def test_a_node_that_offers_no_shared_memory_is_reached_as_before(
    cluster: MakeCluster, reference: Reference
) -> None:
    prompt = random_prompt(3, 40)
    async with cluster(kv_transports=("zmq",), timers=Timers(new_request_wait_s=60.0)) as c:
        c.options = replace(c.options, kv_transports=SHM)
        c.kill("prefill-0")
        c.add_node("prefill-1", "prefill", bind=c.dead[0].shell.endpoint)
        await eventually(lambda: c.service.not_ready_reason("tiny") is None, "the new prefill node is known")
        assert await c.generate(prompt, max_new_tokens=6) == reference_tokens(reference[1], prompt, 6)
        assert staged_at(c.nodes["decode-0"]) == 0


@pytest.mark.rule(26)
@pytest.mark.asyncio
async def test_slots_of_a_prefill_node_that_dies_are_free_again(cluster: MakeCluster, reference: Reference) -> None:
    prompt = random_prompt(2, 60)
    async with cluster(prefill=2, kv_transports=SHM, timers=Timers(quarantine_s=0.3, new_request_wait_s=60.0)) as c:
        prefills = [node for node in c.nodes.values() if node.role == "prefill"]
        for node in prefills:
            node.pauses.arm("after_layer")
        answer = asyncio.create_task(c.generate(prompt, max_new_tokens=8))
        await eventually(lambda: any(n.pauses.is_reached("after_layer") for n in prefills), "the first layers")
        serving = next(node for node in prefills if node.pauses.is_reached("after_layer"))
        for node in prefills:
            if node is not serving:
                node.pauses.release_all()
        decode = c.nodes["decode-0"]
        await c.until(decode, lambda core: in_use(core)[0] > 0, "has granted slots")
        c.kill(serving.name)
        assert await answer == reference_tokens(reference[1], prompt, 8)
        await c.until(decode, lambda core: in_use(core) == (0, 0), "has every slot again")
