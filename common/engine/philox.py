"""A stateless, counter-based random generator: noise as a function of (seed, position, token id). Pure.

Philox-4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). Equal seed and
position give equal numbers: alone, in a batch, on another node, after a restart.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_UNIFORM_BITS = 52


def philox_4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """counter [4, n] and key [2, n], 32-bit values in uint64 -> [4, n] random 32-bit values in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _MASK
        c2, c3 = (product0 >> _HALF) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return np.stack((c0, c1, c2, c3))


def uniform(
    seeds: NDArray[np.uint64], positions: NDArray[np.uint64], tokens: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """Broadcastable shapes -> numbers in the open interval (0, 1) with 52 random bits.

    One counter serves two neighbouring token ids, 64 bits each.
    """
    seeds, positions, tokens = np.broadcast_arrays(seeds, positions, tokens)
    words = _words(seeds, positions, tokens >> np.uint64(1))
    odd = (tokens & np.uint64(1)).astype(bool)
    return _fractions(np.where(odd, words[2], words[0]), np.where(odd, words[3], words[1]))


def uniform_of_all(seed: int, position: int, num_tokens: int) -> NDArray[np.float64]:
    """`uniform` for the token ids 0 .. num_tokens - 1 of one seed and position, at half the work."""
    pairs = np.arange((num_tokens + 1) // 2, dtype=np.uint64)
    words = _words(np.full_like(pairs, seed), np.full_like(pairs, position), pairs)
    fractions = np.empty((len(pairs), 2))
    fractions[:, 0] = _fractions(words[0], words[1])
    fractions[:, 1] = _fractions(words[2], words[3])
    return fractions.reshape(-1)[:num_tokens]


def gumbel(uniform_numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard Gumbel noise: arg-max of log-weight + noise is a sample by weight."""
    noise: NDArray[np.float64] = -np.log(-np.log(uniform_numbers))
    return noise


def _words(seeds: NDArray[np.uint64], positions: NDArray[np.uint64], pairs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    counter = np.stack((positions & _MASK, positions >> _HALF, pairs, np.zeros_like(positions)))
    return philox_4x32(counter, np.stack((seeds & _MASK, seeds >> _HALF)))


def _fractions(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.float64]:
    bits = (high << np.uint64(_UNIFORM_BITS - 32)) | (low >> np.uint64(64 - _UNIFORM_BITS))
    fractions: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS
    return fractions
