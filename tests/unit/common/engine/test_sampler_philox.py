"""The generator returns the published values and evenly distributed numbers."""

import numpy as np
import pytest

from kvferry.common.engine.philox import philox_4x32, uniform, uniform_of_all

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
"""Known answers from kat_vectors of the Random123 library, philox4x32 with 10 rounds."""
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_published_values(counter: tuple[int, ...], key: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    got = philox_4x32(_column(counter), _column(key))
    assert tuple(got[:, 0].tolist()) == wanted


def test_values_do_not_depend_on_the_batch() -> None:
    counters = np.stack([_column(counter)[:, 0] for counter, _, _ in KNOWN], axis=1)
    keys = np.stack([_column(key)[:, 0] for _, key, _ in KNOWN], axis=1)
    assert philox_4x32(counters, keys).T.tolist() == [list(wanted) for _, _, wanted in KNOWN]


def test_golden_uniform_numbers() -> None:
    """A change here would make nodes of different versions disagree about the same seed."""
    seeds = np.array([0, 1, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 7, 2**33 + 5], dtype=np.uint64)
    tokens = np.array([0, 1, 49151], dtype=np.uint64)
    assert uniform(seeds, positions, tokens).tolist() == [0.3990464708489646, 0.5576606517471673, 0.8264948995328912]


def test_uniform_numbers_are_evenly_distributed_in_the_open_interval() -> None:
    count = 20_000
    positions, tokens = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(100, dtype=np.uint64))
    numbers = uniform(np.full(positions.shape, 42, dtype=np.uint64), positions, tokens).ravel()
    assert numbers.min() > 0.0
    assert numbers.max() < 1.0
    expected = count / 20
    statistic = (((np.histogram(numbers, bins=20, range=(0, 1))[0] - expected) ** 2) / expected).sum()
    # 19 degrees of freedom: 43.8 is the 0.1 % quantile; the seed is fixed, so it cannot flake.
    assert statistic < 43.8
    neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(neighbours) < 0.03


def test_neighbouring_seeds_positions_and_tokens_differ() -> None:
    seeds, positions = np.meshgrid(np.arange(50, dtype=np.uint64), np.arange(50, dtype=np.uint64))
    numbers = uniform(seeds.ravel()[:, None], positions.ravel()[:, None], np.arange(4, dtype=np.uint64))
    assert len(set(numbers.ravel().tolist())) == 10_000


def test_numbers_of_the_whole_vocabulary_equal_those_of_single_tokens() -> None:
    for seed, position, count in ((5, 0, 1), (2**64 - 1, 2**40, 8), (77, 3, 1001)):
        tokens = np.arange(count, dtype=np.uint64)
        wanted = uniform(np.full(count, seed, dtype=np.uint64), np.full(count, position, dtype=np.uint64), tokens)
        assert uniform_of_all(seed, position, count).tolist() == wanted.tolist()


def _column(values: tuple[int, ...]) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
    return np.array(values, dtype=np.uint64)[:, None]
