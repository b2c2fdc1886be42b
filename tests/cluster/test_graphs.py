"""A decode node whose steps are recorded streams what one without does."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.models.load import load_model
from tests.support.cluster import MODEL, ClusterOptions, running_cluster
from tests.support.replayed_graphs import GraphDevice
from tests.support.tiny_llama import random_prompt, reference_tokens


@pytest.mark.asyncio
async def test_recorded_steps_through_a_cluster(reference: tuple[Path, Any], tmp_path: Path) -> None:
    device = GraphDevice()
    loaded = load_model(
        reference[0], device=device, dtype="float32", max_model_len=256, model_name=MODEL, progress=False
    )
    prompts = [random_prompt(seed, 3 + 11 * seed) for seed in range(5)]
    async with running_cluster(loaded, device, str(tmp_path), ClusterOptions(graph_batch_sizes=(1, 4))) as cluster:
        answers = await asyncio.gather(*(cluster.generate(prompt, max_new_tokens=9) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference_tokens(reference[1], prompt, 9)
    assert {len(lengths) for lengths in device.replays} <= {1, 4}
    assert device.replays
