"""A counter-based random generator: noise as a function of (seed, position), with no state to carry along.

Philox-4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). Whoever knows
the seed and the position draws the same number: alone, in a batch, on another node, after a restart.
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
    """counter [4, n] and key [2, n], 32-bit values in uint64 -> [4, n] random 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _MASK
        c2, c3 = (product0 >> _HALF) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return np.stack((c0, c1, c2, c3))


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """seeds and positions [n] -> [n] in (0, 1), exclusive on both sides, from 52 random bits."""
    zero = np.zeros_like(positions)
    counter = np.stack((positions & _MASK, positions >> _HALF, zero, zero))
    words = philox_4x32(counter, np.stack((seeds & _MASK, seeds >> _HALF)))
    bits = (words[0] << np.uint64(_UNIFORM_BITS - 32)) | (words[1] >> np.uint64(64 - _UNIFORM_BITS))
    fractions: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS
    return fractions
