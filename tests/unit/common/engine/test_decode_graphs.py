"""Recorded and replayed decode steps return the same results as computed ones.

The stand-in for a device's graphs (`tests/support/replayed_graphs.py`) rejects operations that a real one could not
record, replays on the same memory only, and fills all other memory with garbage.
"""

import logging
from array import array
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.common.device.quantize import WeightScheme
from kvferry.common.engine.batch import make_batch
from kvferry.common.engine.decode_graphs import DecodeGraphs, GraphSize, graph_sizes, num_scratch_blocks
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.engine.step_buffers import InputBuffers
from kvferry.common.models.load import LoadedModel, load_model
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.step import ScheduledSequence
from tests.support.engine_driver import EngineDriver, Sequence
from tests.support.paged_device import PagedDevice
from tests.support.replayed_graphs import ReplayedGraphs
from tests.support.tiny_families import make_family_checkpoint
from tests.support.tiny_llama import make_checkpoint, random_prompt

BLOCK = 4
SIZES = tuple(GraphSize(*size) for size in product((1, 2, 4, 8), (4, 16)))
MODELS: dict[str, tuple[str, dict[str, Any], WeightScheme | None]] = {
    "llama": ("", {}, None),
    "windows": ("qwen2", {"sliding_window": 9, "max_window_layers": 1, "use_sliding_window": True}, None),
    "head norms, int8 rows": ("qwen3", {}, "int8_dynamic"),
    "latent": ("deepseek_v3", {"first_k_dense_replace": 3}, None),
}


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return _load(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return _load("llama", tmp_path_factory.mktemp("model"))


def _load(name: str, path: Path) -> LoadedModel:
    family, changes, scheme = MODELS[name]
    make_family_checkpoint(path, family, **changes) if family else make_checkpoint(path)
    return load_model(path, device=PagedDevice(), dtype="float32", progress=False, scheme=scheme)


def driver_of(loaded: LoadedModel, graphs: ReplayedGraphs | None, sizes: tuple[GraphSize, ...] = SIZES) -> EngineDriver:
    return EngineDriver(loaded, PagedDevice(), 64, BLOCK, graphs=graphs, graph_sizes=sizes if graphs else ())


def params(seed: int) -> SamplingParams:
    """Every third seed is greedy."""
    return SamplingParams(
        max_new_tokens=1, do_sample=seed % 3 > 0, seed=seed, temperature=1.5, top_k=40, repetition_penalty=1.1
    )


def test_tokens_equal_those_of_an_engine_without_graphs(loaded: LoadedModel) -> None:
    """Batches grow and shrink, prompt chunks come in between, block tables outgrow the short width."""
    outputs = []
    graphs = ReplayedGraphs()
    for used in (graphs, None):
        driver = driver_of(loaded, used)
        sequences = [driver.add(random_prompt(n, n), params(n)) for n in (3, 21, 9, 40, 1, 14, 5)]
        driver.serve(sequences, 12, budget=30, in_flight=5)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert {len(lengths) for lengths in graphs.replays} == {2, 4, 8}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_replay_is_bit_identical_to_the_computed_step(loaded: LoadedModel, count: int) -> None:
    """Hidden states and cache: padded and full batches, over a shared prefix, after replays of other sizes."""
    driver = driver_of(loaded, ReplayedGraphs())
    sequences = _decoding(driver, count)
    driver.generate(sequences, 3)
    driver.generate([driver.add(random_prompt(9, 6))], 4)
    assert driver.graphs is not None
    scheduled = [_next_step(driver, sequence) for sequence in sequences]
    caches = [tuple(tensor.clone() for tensor in layer) for layer in driver.cache.layers]
    with torch.inference_mode():
        replayed = driver.graphs.forward(scheduled)
        assert replayed is not None
        _, hidden = replayed
        width = replayed[0].meta.block_tables.shape[1]
        filled = [*scheduled, *driver.graphs._padding[: len(hidden) - count]]
        batch = make_batch(filled, BLOCK, InputBuffers(PagedDevice()), width)
        # Masked keys contribute zeros, but their number changes the summation order of the other keys.
        meta = replace(batch.meta, seq_lens=(width * BLOCK,) * len(hidden))
        wanted = loaded.model.forward(batch.token_ids, batch.positions, caches, meta)
        assert torch.equal(hidden, wanted)
        for layer, other in zip(driver.cache.layers, caches, strict=True):
            assert all(torch.equal(one, two) for one, two in zip(layer, other, strict=True))
        batch = make_batch(scheduled, BLOCK, InputBuffers(PagedDevice()))
        alone = loaded.model.forward(batch.token_ids, batch.positions, caches, batch.meta)
        torch.testing.assert_close(hidden[:count], alone, rtol=1e-4, atol=1e-4)


def test_padding_rows_write_to_scratch_blocks_only(llama: LoadedModel) -> None:
    driver = driver_of(llama, ReplayedGraphs())
    sequences = _decoding(driver, 5)
    scheduled = [_next_step(driver, sequence) for sequence in sequences]
    assert driver.graphs is not None
    before = [tensor.clone() for layer in driver.cache.layers for tensor in layer]
    with torch.inference_mode():
        driver.graphs.forward(scheduled)
    written = {sequence.blocks[(len(sequence.ids) - 1) // BLOCK] for sequence in sequences}
    for tensor, old in zip((tensor for layer in driver.cache.layers for tensor in layer), before, strict=True):
        changed = {block for block in range(len(old)) if not torch.equal(tensor[block], old[block])}
        assert changed - set(driver.cache.scratch_blocks) == written


def test_a_failure_in_a_replay_fails_its_own_sequence_only(llama: LoadedModel) -> None:
    graphs = ReplayedGraphs()
    driver, undisturbed = driver_of(llama, graphs), driver_of(llama, None)
    sequences, others = _decoding(driver, 3), _decoding(undisturbed, 3)
    driver.cache.layers[1][0][sequences[1].blocks[1]] = float("nan")
    for _ in range(4):
        driver.step([(sequence, 1) for sequence in sequences if sequence.failed is None])
        undisturbed.step([(sequence, 1) for sequence in others])
    assert sequences[1].failed is not None
    assert "finite" in sequences[1].failed
    assert [sequences[0].ids, sequences[2].ids] == [others[0].ids, others[2].ids]


def test_steps_that_fit_no_graph_are_computed(llama: LoadedModel) -> None:
    graphs = ReplayedGraphs()
    driver = driver_of(llama, graphs, (GraphSize(2, 4),))
    three = _decoding(driver, 3)
    driver.step([(sequence, 1) for sequence in three])
    assert graphs.replays == [], "too many sequences"
    driver.step([(three[0], 1), (driver.add(random_prompt(1, 5)), 5)])
    assert graphs.replays == [], "a prompt chunk"
    reported: list[int] = []
    driver.reserve(three[0], len(three[0].ids))
    driver.step([(three[0], 1)], reported.append)
    assert graphs.replays == [], "layers are reported"
    assert reported == [1, 2, 3]
    driver.step([(three[1], 1)])
    assert len(graphs.replays) == 1
    long = driver.add(random_prompt(2, 20))
    driver.generate([long], 3)
    assert len(graphs.replays) == 1, "too long a table"


def test_a_step_that_cannot_be_recorded_is_logged_once_and_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts are computed one by one, so the host waits for the routing."""
    make_family_checkpoint(tmp_path, "qwen3_moe")
    experts = load_model(tmp_path, device=PagedDevice(), dtype="float32", progress=False)
    graphs = ReplayedGraphs()
    with caplog.at_level(logging.WARNING, logger="kvferry.engine"):
        driver = driver_of(experts, graphs)
    assert [record.getMessage() for record in caplog.records] == [
        "a step of 8 sequences cannot be recorded: aten.bincount.default has a shape that depends on values"
    ]
    plain = driver_of(experts, None)
    outputs = []
    for used in (driver, plain):
        sequence = used.add(random_prompt(3, 7))
        used.generate([sequence], 4)
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]
    assert graphs.replays == []


def test_sizes_halve_their_tables_and_respect_the_token_limit() -> None:
    sizes = graph_sizes((4, 1, 64), max_blocks=160, block_size=16, most_tokens=1 << 16)
    assert sizes == (
        GraphSize(1, 20), GraphSize(1, 40), GraphSize(1, 80), GraphSize(1, 160),
        GraphSize(4, 20), GraphSize(4, 40), GraphSize(4, 80), GraphSize(4, 160),
        GraphSize(64, 20), GraphSize(64, 40),
    )  # fmt: skip
    assert graph_sizes((1,), 3, 16, 1 << 16) == (GraphSize(1, 3),)
    assert num_scratch_blocks(sizes, 16) == 4
    assert num_scratch_blocks(sizes, 128) == 1
    assert num_scratch_blocks((), 16) == 0


class ShrinkingMemory(PagedDevice):
    """A device whose free memory shrinks with each query."""

    def __init__(self, *free: int) -> None:
        super().__init__()
        left = list(free)
        self.memory_info = lambda: (left.pop(0), 1000)


@pytest.mark.parametrize(
    ("free", "sizes", "wanted"), [((900, 700, 695), 4, 200 + 3 * 5), ((900, 700), 1, 200), ((700, 900, 900), 3, 0)]
)
def test_memory_is_estimated_from_the_two_largest_sizes(
    llama: LoadedModel, free: tuple[int, ...], sizes: int, wanted: int
) -> None:
    table = tuple(GraphSize(n, 2) for n in range(1, sizes + 1))
    device, config = ShrinkingMemory(*free), llama.config
    cache = KvCache(device, llama.kv_specs, config.num_layers, 1, BLOCK, num_scratch_blocks(table, BLOCK))
    assert DecodeGraphs(llama.model, cache, device, ReplayedGraphs(), table).measure() == wanted


def _decoding(driver: EngineDriver, count: int) -> list[Sequence]:
    """Sequences whose next step is one decode token each; the second shares the first's prefix."""
    sequences = [driver.add(random_prompt(n, 5 + 2 * n), params(n)) for n in range(count)]
    for sequence in sequences[:1]:
        driver.generate([sequence], 1)
    if count > 1:
        sequences[1].ids[:BLOCK] = sequences[0].ids[:BLOCK]
        driver.share_prefix(sequences[0], sequences[1], 1)
        driver.generate(sequences[1:], 1)
    return sequences


def _next_step(driver: EngineDriver, sequence: Sequence) -> ScheduledSequence:
    end = len(sequence.ids)
    driver.reserve(sequence, end)
    return ScheduledSequence(sequence.seq_id, array("I", sequence.ids[-1:]), end - 1, tuple(sequence.blocks), True, end)
