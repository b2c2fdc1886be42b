"""Many requests of all kinds at the same time: each ends once, says every index once, and nothing is left behind."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.config.protocol import Limits
from kvferry.common.models.load import LoadedModel
from kvferry.common.protocol.sampling_params import SamplingParams
from tests.cluster.conftest import MakeCluster
from tests.support.cluster import Cluster, tokens_of
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_llama import random_prompt, reference_tokens

Reference = tuple[Path, Any]
REQUESTS = 200


@dataclass(frozen=True)
class Ask:
    """One of many clients."""

    prompt: list[int]
    parameters: dict[str, Any]
    streamed: bool
    leaves: bool


def fill() -> list[Ask]:
    """Mixed lengths, priorities, sampling and streaming; a tenth leaves mid-way. Half share a beginning."""
    rng = random.Random(5)
    shared = random_prompt(99, 64)
    asks = []
    for number in range(REQUESTS):
        prompt = random_prompt(number, rng.choice([1, 7, 40, 150]))
        if rng.random() < 0.5:
            prompt = shared + prompt
        parameters: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 9, 25]), "priority": rng.randint(1, 5)}
        if rng.random() < 0.5:
            parameters |= {"do_sample": True, "seed": number + 1, "temperature": 0.9, "top_p": 0.95}
        if rng.random() < 0.3:
            parameters["repetition_penalty"] = 1.2
        asks.append(Ask(prompt, parameters, rng.random() < 0.5, number % 10 == 3))
    return asks


async def run_one(c: Cluster, ask: Ask) -> list[int] | None:
    """The output ids; None for a client that left."""
    answer = asyncio.ensure_future(
        c.stream(ask.prompt, **ask.parameters) if ask.streamed else c.generate(ask.prompt, **ask.parameters)
    )
    if ask.leaves:
        await asyncio.sleep(0)
        await asyncio.wait([answer], timeout=0.02 * len(ask.prompt) % 1.0)
        if not answer.done():
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            return None
    said = await answer
    return tokens_of(said) if ask.streamed else said  # type: ignore[arg-type, return-value]


@pytest.mark.asyncio
@pytest.mark.slow
async def test_200_immediately(cluster: MakeCluster, reference: Reference) -> None:
    asks = fill()
    sizes = {"num_blocks": 700, "max_step_tokens": 128, "max_running": 64}
    limits = Limits(queued_requests=1024)
    async with cluster(prefill=2, decode=2, limits=limits, **sizes) as c:
        answers = await asyncio.gather(*(run_one(c, ask) for ask in asks))
    stayed = [(ask, answer) for ask, answer in zip(asks, answers, strict=True) if answer is not None]
    assert len(stayed) >= REQUESTS * 0.9
    for ask, answer in stayed:
        plain = not ask.parameters.get("do_sample") and "repetition_penalty" not in ask.parameters
        if plain:
            assert answer == reference_tokens(reference[1], ask.prompt, ask.parameters["max_new_tokens"])


@pytest.mark.asyncio
async def test_same_seed_same_tokens_in_any_company(cluster: MakeCluster) -> None:
    """Alone, in a batch, on another pair, with prefix hits and without."""
    prompt = random_prompt(1, 45)
    parameters = {"max_new_tokens": 20, "do_sample": True, "seed": 2**63 + 5, "temperature": 1.5, "top_k": 40}
    parameters |= {"top_p": 0.9, "repetition_penalty": 1.3}
    async with cluster() as c:
        alone = await c.generate(prompt, **parameters)
        again = await c.generate(prompt, **parameters)
    async with cluster(prefill=2, decode=2, prefix_cache=False, max_step_tokens=32) as c:
        others = [c.generate(random_prompt(n, 30), max_new_tokens=20, do_sample=True, seed=n) for n in range(1, 9)]
        crowded, *_ = await asyncio.gather(c.generate(prompt, **parameters), *others)
    assert alone == again == crowded
    assert len(set(alone)) > 5


@pytest.mark.asyncio
async def test_same_tokens_split_or_on_one_engine(cluster: MakeCluster, loaded: LoadedModel) -> None:
    """Sampled with all that a request may ask for: two nodes and a KV transfer between them change nothing."""
    prompts = [random_prompt(seed, 11 + 17 * seed) for seed in range(4)]
    asked: dict[str, Any] = {"temperature": 1.4, "top_k": 60, "top_p": 0.95, "repetition_penalty": 1.2}
    engine = EngineDriver(loaded)
    together = []
    for seed, prompt in enumerate(prompts, start=1):
        sampling = SamplingParams(max_new_tokens=15, do_sample=True, seed=seed, **asked)
        together.append(engine.add(prompt, sampling))
    engine.generate(together, 15)
    async with cluster() as c:
        for seed, (prompt, sequence) in enumerate(zip(prompts, together, strict=True), start=1):
            split = await c.generate(prompt, max_new_tokens=15, do_sample=True, seed=seed, **asked)
            eos = loaded.info.eos_token_ids[0]
            whole = sequence.output
            assert split == (whole[: whole.index(eos) + 1] if eos in whole else whole)
