"""The runner: ragged batches, layer reports, failures limited to one sequence, reproducible sampling."""

from array import array
from pathlib import Path

import pytest
import torch

from kvferry.common.device.cpu import CpuDevice
from kvferry.common.models.load import LoadedModel, load_model
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch
from tests.support.engine_driver import EngineDriver, Sequence
from tests.support.tiny_llama import make_checkpoint, random_prompt


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return load_model(path, device=CpuDevice(), progress=False)


def alone(loaded: LoadedModel, prompt: list[int], count: int, sampling: SamplingParams) -> list[int]:
    driver = EngineDriver(loaded)
    sequence = driver.add(prompt, sampling)
    driver.generate([sequence], count)
    return sequence.output


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=1, do_sample=True, seed=seed, temperature=1.5, top_k=40, top_p=0.95, repetition_penalty=1.1
    )


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(loaded: LoadedModel) -> None:
    lengths = (1, 5, 30, 64, 3, 100)
    driver = EngineDriver(loaded)
    sequences = [driver.add(random_prompt(n, n), sampled(n + 1)) for n in lengths]
    driver.serve(sequences, 10, budget=23, in_flight=4)
    for n, sequence in zip(lengths, sequences, strict=True):
        assert sequence.output == alone(loaded, random_prompt(n, n), 10, sampled(n + 1))
        assert sequence.output != alone(loaded, random_prompt(n, n), 10, sampled(n + 1000))


@pytest.mark.rule(32)
def test_a_second_attempt_continues_with_the_same_tokens(loaded: LoadedModel) -> None:
    """Prompt and tokens so far, given to a new runner as one longer prompt: seed, position and penalty agree."""
    prompt = random_prompt(1, 20)
    whole = alone(loaded, prompt, 12, sampled(5))
    driver = EngineDriver(loaded)
    sequence = driver.add(prompt + whole[:7], sampled(5), prompt_length=len(prompt))
    driver.generate([sequence], 12, chunk=6)
    assert sequence.output == whole


@pytest.mark.rule(20)
def test_layers_are_reported_in_order_and_their_kv_is_complete(loaded: LoadedModel) -> None:
    prompt = random_prompt(2, 21)
    driver = EngineDriver(loaded)
    quiet = driver.add(prompt)
    driver.generate([quiet], 1)
    wanted = bytes(driver.cache.read(0, 3, quiet.blocks, 0, 21))
    reported = driver.add(prompt)
    driver.reserve(reported, 21)
    pieces = []

    def on_layers_done(count: int) -> None:
        pieces.append(bytes(driver.cache.read(count - 1, count, reported.blocks, 0, 21)))

    driver.step([(reported, 100)], on_layers_done)
    assert len(pieces) == 3
    assert b"".join(pieces) == wanted


def test_a_layer_callback_does_not_change_the_step(loaded: LoadedModel) -> None:
    """The callback of a step without `report_layers` is called as layers are started."""
    driver, called = EngineDriver(loaded), list[int]()
    sequence = driver.add([1, 2, 3])
    driver.reserve(sequence, 3)
    scheduled = ScheduledSequence(1, array("I", [1, 2, 3]), 0, tuple(sequence.blocks), False)
    batch = StepBatch(1, (scheduled,))
    assert driver.runner.execute(batch, called.append).sampled == {}
    assert called == [1, 2, 3]


def test_a_step_without_work_adds_and_drops_sequences(loaded: LoadedModel) -> None:
    driver = EngineDriver(loaded)
    sequence = driver.add([1, 2])
    assert driver.step([]).sampled == {}
    assert driver.sampler.num_sequences == 1
    driver.finish(sequence)
    driver.step([])
    assert driver.sampler.num_sequences == 0


def test_a_chunk_in_the_middle_of_a_prompt_samples_nothing(loaded: LoadedModel) -> None:
    driver = EngineDriver(loaded)
    sequence = driver.add(random_prompt(3, 20))
    assert driver.step([(sequence, 19)]).sampled == {}
    assert list(driver.step([(sequence, 19)]).sampled) == [sequence.seq_id]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_the_kv_of_one_sequence_fails_that_sequence_only(
    loaded: LoadedModel, dtype: torch.dtype, tmp_path: Path
) -> None:
    if dtype == torch.bfloat16:
        make_checkpoint(tmp_path)
        loaded = load_model(tmp_path, device=CpuDevice(), dtype="bfloat16", progress=False)
    prompts = [random_prompt(n, n) for n in (18, 9, 14)]
    wanted = [alone(loaded, prompt, 6, SamplingParams(max_new_tokens=6)) for prompt in prompts]
    driver = EngineDriver(loaded)
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.generate(sequences, 3)
    _poison(driver, sequences[0])
    driver.generate(sequences, 6)
    assert sequences[0].failed is not None
    assert "finite" in sequences[0].failed
    assert [sequence.output for sequence in sequences[1:]] == wanted[1:]


def test_nan_left_in_reused_blocks_does_not_affect_other_sequences(loaded: LoadedModel) -> None:
    """Slots after a sequence's last token are read as padding and must not affect its result."""
    prompts = [random_prompt(n, n) for n in (17, 30, 22)]
    wanted = [alone(loaded, prompt, 8, SamplingParams(max_new_tokens=8)) for prompt in prompts]
    driver = EngineDriver(loaded, blocks=24)
    for layer in driver.cache.layers:
        for tensor in layer:
            tensor.fill_(float("nan"))
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.generate(sequences, 8, chunk=5)
    assert [sequence.output for sequence in sequences] == wanted


def test_a_block_table_that_is_too_short_is_rejected(loaded: LoadedModel) -> None:
    driver = EngineDriver(loaded, block_size=4)
    scheduled = ScheduledSequence(1, array("I", [1, 2, 3, 4, 5]), 0, (0,), False)
    with pytest.raises(ValueError, match="up to 5, with 1 blocks"):
        driver.runner.execute(StepBatch(1, (scheduled,)))


def _poison(driver: EngineDriver, sequence: Sequence) -> None:
    driver.cache.layers[1][0][sequence.blocks[0]] = float("nan")
