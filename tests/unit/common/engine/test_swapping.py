"""Swapping KV to the host and back: whole blocks in every layout, and unchanged streams."""

from array import array
from pathlib import Path

import pytest
import torch

from kvferry.common.base.errors import InvariantError
from kvferry.common.device.base import Device, KvTensorSpec
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.graphs import Graphs
from kvferry.common.engine.decode_graphs import DecodeGraphs, GraphSize
from kvferry.common.engine.host_cache import HostCache, runs
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.engine.runner import ModelRunner
from kvferry.common.engine.sampler import Sampler
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.kv.host_pool import HostPool
from kvferry.common.models.load import LoadedModel, load_model
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.events import Sampled
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceSpec
from kvferry.common.scheduling.step import BlockCopies, StepBatch
from tests.support.engine_driver import EngineDriver
from tests.support.paged_device import PagedDevice
from tests.support.replayed_graphs import ReplayedGraphs
from tests.support.tiny_llama import make_checkpoint, random_prompt

SPECS = (KvTensorSpec("key", (2, 3), torch.float32), KvTensorSpec("latent", (5,), torch.bfloat16, None))
LAYERS, BLOCKS, HOST_BLOCKS, BLOCK_SIZE = 3, 9, 5, 4
DEVICES = [CpuDevice(1), PagedDevice()]
PROMPTS = [random_prompt(seed, length) for seed, length in ((1, 14), (2, 9), (3, 21), (4, 3))]
NEW_TOKENS = 24


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ((), (), []),
        ((4,), (7,), [(4, 7, 1)]),
        ((4, 5, 6), (0, 1, 2), [(4, 0, 3)]),
        ((4, 5, 7), (0, 1, 2), [(4, 0, 2), (7, 2, 1)]),
        ((4, 5, 6), (0, 2, 3), [(4, 0, 1), (5, 2, 2)]),
        ((6, 5), (0, 1), [(6, 0, 1), (5, 1, 1)]),
    ],
)
def test_runs_on_both_sides_are_one_copy(
    first: tuple[int, ...], second: tuple[int, ...], wanted: list[tuple[int, int, int]]
) -> None:
    assert list(runs(first, second)) == wanted


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: type(device).__name__)
def test_blocks_come_back_whole_to_other_blocks_and_nothing_else_changes(device: Device) -> None:
    cache = KvCache(device, SPECS, LAYERS, BLOCKS, BLOCK_SIZE)
    host = HostCache(device, cache, HOST_BLOCKS)
    host.check_invariants()
    data = bytes(range(64)) * 1000
    data = data[: cache.range_bytes(0, LAYERS, 0, 12)]
    cache.write(0, LAYERS, [7, 8, 2], 0, 12, data)
    host.copy_out([7, 8, 2], [1, 2, 4])
    cache.write(0, LAYERS, [7, 8, 2], 0, 12, bytes(len(data)))
    host.copy_in([0, 3, 4], [1, 2, 4])
    assert bytes(cache.read(0, LAYERS, [0, 3, 4], 0, 12)) == data
    assert not any(cache.read(0, LAYERS, [1, 2, 5, 6, 7, 8], 0, 24))
    with pytest.raises(ValueError, match="zip"):
        host.copy_in([0, 1], [1])


def test_zero_host_blocks_take_no_memory_and_a_mismatch_is_detected() -> None:
    cache = KvCache(CpuDevice(), SPECS, LAYERS, BLOCKS, BLOCK_SIZE)
    assert HostCache(CpuDevice(), cache, 0)._pairs == []
    host = HostCache(CpuDevice(), cache, 2)
    host.num_blocks = 3
    with pytest.raises(InvariantError, match="do not fit"):
        host.check_invariants()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return load_model(path, device=CpuDevice(), dtype="float32", progress=False)


def test_a_step_of_copies_alone_is_complete_on_return(loaded: LoadedModel) -> None:
    driver = EngineDriver(loaded, host_blocks=4)
    sequence = driver.add(PROMPTS[0])
    driver.generate([sequence], 1)
    kv = bytes(driver.cache.read(0, driver.cache.num_layers, sequence.blocks, 0, 14))
    blocks, host = tuple(sequence.blocks), (3, 0, 1, 2)
    assert driver.runner.execute(StepBatch(90, (), swap_out=(BlockCopies(1, blocks, host),))).sampled == {}
    driver.cache.write(0, driver.cache.num_layers, sequence.blocks, 0, 14, bytes(len(kv)))
    driver.runner.execute(StepBatch(91, (), swap_in=(BlockCopies(1, blocks, host),)))
    assert bytes(driver.cache.read(0, driver.cache.num_layers, sequence.blocks, 0, 14)) == kv


def serve(
    loaded: LoadedModel, device: Device, num_blocks: int, num_host_blocks: int, recorder: Graphs | None = None
) -> tuple[list[list[int]], int]:
    """Run all prompts with a scheduler and a real engine; returns their tokens and the number of swaps."""
    device.activate_thread()
    cache = KvCache(device, loaded.kv_specs, loaded.config.num_layers, num_blocks, BLOCK_SIZE, 1 if recorder else 0)
    graphs = None
    if recorder is not None:
        graphs = DecodeGraphs(loaded.model, cache, device, recorder, [GraphSize(n, 12) for n in (1, 2, 4)])
        graphs.record()
    runner = ModelRunner(
        loaded.model, cache, Sampler(loaded.config.vocab_size), device, HostCache(device, cache, num_host_blocks),
        graphs=graphs,
    )  # fmt: skip
    config = SchedulerConfig(max_running=8, max_step_tokens=16, watermark_blocks_share=0.0)
    scheduler = Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE, "tiny"), HostPool(num_host_blocks))
    tokens: dict[int, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(
            max_new_tokens=NEW_TOKENS, ignore_eos=True, do_sample=True, seed=number, temperature=1.5, top_k=40,
            repetition_penalty=1.2,
        )  # fmt: skip
        ids = array("I", prompt)
        spec = SequenceSpec(token_ids=ids, num_prompt_tokens=len(ids), sampling=sampling, priority=3, accepted_at=0.0)
        tokens[scheduler.add(spec, 0.0)] = []
    while (plan := scheduler.schedule(0.0).plan) is not None:
        for event in scheduler.apply(runner.execute(plan), 0.0):
            if isinstance(event, Sampled):
                tokens[event.seq_id].append(event.token_id)
        scheduler.check_invariants()
        runner.check_invariants()
    assert scheduler.is_quiescent()
    assert scheduler.load().preemptions == 0
    return list(tokens.values()), scheduler.load().swaps


@pytest.mark.rule(36)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: type(device).__name__)
def test_swapped_streams_equal_the_undisturbed_ones(device: Device, tmp_path: Path, loaded: LoadedModel) -> None:
    if isinstance(device, PagedDevice):
        make_checkpoint(tmp_path)
        loaded = load_model(tmp_path, device=device, dtype="float32", progress=False)
    undisturbed, swaps = serve(loaded, device, num_blocks=64, num_host_blocks=0)
    assert swaps == 0
    assert all(len(stream) == NEW_TOKENS for stream in undisturbed)
    swapped, swaps = serve(loaded, device, num_blocks=15, num_host_blocks=32)
    assert swaps >= 2
    assert swapped == undisturbed


def test_swapped_streams_continue_in_recorded_steps(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    device, recorder = PagedDevice(), ReplayedGraphs()
    loaded = load_model(tmp_path, device=device, dtype="float32", progress=False)
    undisturbed, _ = serve(loaded, device, num_blocks=64, num_host_blocks=0)
    swapped, swaps = serve(loaded, device, num_blocks=15, num_host_blocks=32, recorder=recorder)
    assert swaps >= 2
    assert {len(lengths) for lengths in recorder.replays} == {1, 2, 4}
    assert swapped == undisturbed
