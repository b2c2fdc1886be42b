"""A request through router, prefill node and decode node, all real, in one process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import MakeCluster
from tests.support.cluster import tokens_of
from tests.support.tiny_llama import random_prompt, reference_tokens

Reference = tuple[Path, Any]


@pytest.mark.asyncio
@pytest.mark.parametrize("scheme", ["inproc", "ipc", "tcp"])
async def test_tokens_equal_transformers(cluster: MakeCluster, reference: Reference, scheme: str) -> None:
    prompt = random_prompt(1, 21)
    async with cluster(scheme=scheme) as c:
        assert await c.generate(prompt, max_new_tokens=12) == reference_tokens(reference[1], prompt, 12)


@pytest.mark.asyncio
async def test_stream_says_the_same_once_each(cluster: MakeCluster, reference: Reference) -> None:
    prompt = random_prompt(2, 50)
    async with cluster() as c:
        events = await c.stream(prompt, max_new_tokens=10)
        assert tokens_of(events) == reference_tokens(reference[1], prompt, 10)
        assert events[-1]["finish_reason"] in ("stop", "length")
        assert events[-1]["nodes"] == {"prefill": "prefill-0", "decode": "decode-0"}
        assert events[-1]["usage"]["prompt_tokens"] == 50


@pytest.mark.asyncio
async def test_many_immediately_each_as_if_alone(cluster: MakeCluster, reference: Reference) -> None:
    prompts = [random_prompt(seed, 1 + 13 * seed) for seed in range(12)]
    async with cluster(prefill=2, decode=2) as c:
        answers = await asyncio.gather(*(c.generate(prompt, max_new_tokens=9) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference_tokens(reference[1], prompt, 9)


@pytest.mark.asyncio
async def test_one_token_needs_no_handover(cluster: MakeCluster, reference: Reference) -> None:
    prompt = random_prompt(5, 17)
    async with cluster() as c:
        events = await c.stream(prompt, max_new_tokens=1)
        assert tokens_of(events) == reference_tokens(reference[1], prompt, 1)
        assert events[-1]["nodes"]["decode"] == ""
