"""The sampler samples from the specified distribution, and a sequence's tokens depend on that sequence only."""

from array import array

import msgspec
import numpy as np
import pytest
import torch

from kvferry.common.base.errors import InvariantError
from kvferry.common.engine.sampler import Sampler
from kvferry.common.protocol.sampling_params import SamplingParams

VOCAB = 64
SAMPLES = 4000
NAN, INFINITE = float("nan"), float("inf")


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 1, "do_sample": True, **changes})


def make_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2.5


def sample_one(logits: torch.Tensor, sampling: SamplingParams, position: int, seen: tuple[int, ...] = (0,)) -> int:
    sampler = Sampler(logits.shape[-1])
    sampler.add(1, array("I", seen), sampling)
    return sampler.sample([1], [position], logits.reshape(1, -1)).sampled[1]


def reference_distribution(logits: torch.Tensor, sampling: SamplingParams, seen: tuple[int, ...]) -> np.ndarray:
    """Straightforward and in float64: penalty, temperature, top_k, top_p including the crossing token."""
    values = logits.double().numpy().copy()
    for token in set(seen):
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    values /= sampling.temperature
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    order = order[: sampling.top_k or len(order)]
    weights = np.exp(values[order] - values[order].max())
    weights /= weights.sum()
    retained = next((n for n in range(1, len(order)) if weights[:n].sum() >= sampling.top_p), len(order))
    out = np.zeros(len(values))
    out[order[:retained]] = weights[:retained] / weights[:retained].sum()
    return out


DISTRIBUTIONS = {
    "plain": params(),
    "cold": params(temperature=0.4),
    "hot": params(temperature=3.0),
    "top_k": params(top_k=7),
    "top_k_above_vocab": params(top_k=2_147_483_647),
    "top_p": params(top_p=0.8),
    "top_p_tiny": params(top_p=0.00001),
    "top_k_and_top_p": params(top_k=20, top_p=0.6),
    "penalty": params(repetition_penalty=1.9),
    "reward": params(repetition_penalty=0.5),
    "all": params(temperature=1.4, top_k=25, top_p=0.9, repetition_penalty=1.3),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution_is_the_specified_one(name: str) -> None:
    """Pearson's chi-square over SAMPLES positions of one seed; ids expected fewer than 8 times share one cell."""
    logits, seen = make_logits(1)[0], (3, 3, 17, 40, 41)
    sampling = msgspec.structs.replace(DISTRIBUTIONS[name], seed=99)
    sampler = Sampler(VOCAB)
    counts = np.zeros(VOCAB)
    for start in range(0, SAMPLES, 500):
        ids = list(range(start, start + 500))
        for seq_id in ids:
            sampler.add(seq_id, array("I", seen), sampling)
        result = sampler.sample(ids, ids, logits.expand(500, -1))
        counts += np.bincount(list(result.sampled.values()), minlength=VOCAB)
    expected = reference_distribution(logits, sampling, seen) * SAMPLES
    assert counts[expected == 0].sum() == 0
    rare = (expected < 8) & (expected > 0)
    cells = list(zip(counts[expected >= 8], expected[expected >= 8], strict=True))
    if rare.any():
        cells.append((counts[rare].sum(), expected[rare].sum()))
    statistic = sum((seen_count - wanted) ** 2 / wanted for seen_count, wanted in cells)
    degrees = len(cells) - 1
    # Mean plus five standard deviations of the distribution. The seed is fixed: the test cannot flake.
    assert statistic <= degrees + 5 * (2 * degrees) ** 0.5
    sampler.check_invariants()


def test_a_large_vocabulary_with_a_wide_nucleus() -> None:
    """The nucleus exceeds the first candidates: the full sort gives the same token."""
    vocab = 5000
    logits = make_logits(2, vocab=vocab)[0] * 0.01
    for position in range(20):
        token = sample_one(logits, params(top_p=0.9, seed=5), position)
        limited = sample_one(logits, params(top_p=0.9, top_k=vocab - 1, seed=5), position)
        # Excluding the least likely of 5000 tokens moves the bounds by far less than one token's probability.
        order = logits.argsort(descending=True).tolist()
        assert abs(order.index(token) - order.index(limited)) <= 1
        assert order.index(token) < 0.92 * vocab


MIXED = [
    params(seed=1),
    params(seed=2, top_k=5),
    params(seed=3, top_p=0.7),
    params(seed=4, top_k=33, top_p=0.5, temperature=2.0),
    params(seed=5, do_sample=False),
    params(seed=6, repetition_penalty=1.7),
    params(seed=7, repetition_penalty=1.2, do_sample=False),
    params(seed=2**64 - 1, temperature=0.001),
    params(seed=8, top_k=1000),
]


@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_do_not_depend_on_the_batch(threads: int) -> None:
    vocab = 3000
    logits = make_logits(3, len(MIXED), vocab)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = [sample_one(logits[row], sampling, 50 + row, (row, 9)) for row, sampling in enumerate(MIXED)]
        for order in (list(range(len(MIXED))), list(reversed(range(len(MIXED)))), [7, 1, 3, 0], [2, 2 + 4]):
            sampler = Sampler(vocab)
            for row in order:
                sampler.add(row, array("I", (row, 9)), MIXED[row])
            result = sampler.sample(order, [50 + row for row in order], logits[order])
            assert result.sampled == {row: alone[row] for row in order}
    finally:
        torch.set_num_threads(before)


def test_golden_tokens() -> None:
    """Equal seed, position and logits give these tokens on every node and version."""
    logits = torch.arange(VOCAB, dtype=torch.float32).flip(0) * 0.1
    tokens = [sample_one(logits, params(seed=seed, top_k=50, top_p=0.95), 10 * seed) for seed in range(1, 9)]
    assert tokens == [21, 10, 8, 0, 26, 2, 7, 18]


def test_seed_and_position_determine_the_token() -> None:
    logits = make_logits(4)[0]
    by_position = [sample_one(logits, params(seed=11), position) for position in range(40)]
    assert by_position == [sample_one(logits, params(seed=11), position) for position in range(40)]
    assert by_position != [sample_one(logits, params(seed=12), position) for position in range(40)]
    assert len(set(by_position)) > 5


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(VOCAB)
    logits[[9, 21, 60]] = 4.0
    assert sample_one(logits, params(do_sample=False), 1) == 9
    assert sample_one(logits, params(top_k=1), 1) == 9


def test_top_k_takes_the_lowest_ids_of_equal_logits() -> None:
    logits = torch.full((VOCAB,), -1.0)
    logits[5::7] = 0.0
    logits[12] = -0.0
    tokens = {sample_one(logits, params(top_k=3, seed=seed), 0) for seed in range(1, 60)}
    assert tokens == {5, 12, 19}


def test_penalty_includes_sampled_tokens() -> None:
    """Greedy sampling over the same logits takes another token each time, since sampled ones are penalised."""
    logits = torch.full((1, VOCAB), 1.0)
    logits[0, 30], logits[0, 10], logits[0, 20] = 8.0, 7.0, 6.0
    sampler = Sampler(VOCAB)
    sampler.add(1, array("I", [10]), params(do_sample=False, repetition_penalty=20.0))
    tokens = [sampler.sample([1], [position], logits).sampled[1] for position in range(3)]
    assert tokens == [30, 20, 0]
    assert logits[0, 30] == 8.0, "the caller's logits were changed"


def test_penalty_multiplies_logits_that_are_not_positive() -> None:
    logits = torch.tensor([-1.0, -1.5, -9.0])
    assert sample_one(logits, params(do_sample=False, repetition_penalty=2.0), 0, seen=(0,)) == 1


@pytest.mark.parametrize("bad", [NAN, INFINITE])
@pytest.mark.parametrize(
    "sampling", [params(), params(do_sample=False), params(top_k=3), params(repetition_penalty=1.5)]
)
def test_logits_that_are_not_finite_fail_their_own_sequence(bad: float, sampling: SamplingParams) -> None:
    logits = make_logits(6, 3)
    logits[1, 33] = bad
    sampler = Sampler(VOCAB)
    for seq_id in range(3):
        sampler.add(seq_id, array("I", [1]), sampling)
    result = sampler.sample([0, 1, 2], [4, 4, 4], logits)
    assert list(result.failed) == [1]
    assert sorted(result.sampled) == [0, 2]
    assert result.sampled[0] == sample_one(logits[0], sampling, 4, (1,))


def test_a_logit_of_minus_infinity_is_never_sampled() -> None:
    logits = torch.full((VOCAB,), -INFINITE)
    logits[[4, 8]] = 0.5
    assert {sample_one(logits, params(seed=seed), 0) for seed in range(1, 40)} == {4, 8}


def test_unknown_and_repeated_sequences_raise() -> None:
    sampler = Sampler(VOCAB)
    sampler.add(1, array("I", [1]), params())
    with pytest.raises(InvariantError, match="twice"):
        sampler.add(1, array("I", [1]), params())
    with pytest.raises(InvariantError, match="never added"):
        sampler.sample([2], [1], make_logits(1))
    sampler.drop(1)
    sampler.drop(1)
    assert sampler.num_sequences == 0
