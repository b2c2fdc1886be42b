"""The simulated model: the next token, and the KV cache content of a position. Pure functions.

Both depend on all token ids so far, so a result computed from a wrong or stale cache is always detected.
"""

from array import array
from collections.abc import Iterable
from zlib import crc32

from kvferry.common.protocol.sampling_params import SamplingParams

MASK = (1 << 61) - 1
VOCAB_SIZE = 61
EOS_TOKEN_ID = 2
USUAL_WEIGHTS, USUAL_DTYPE = "sim", "sim"


def extend(parent: int, token_id: int) -> int:
    """Return the digest of a prefix, given the digest of all ids but the last."""
    return (parent * 0x9E3779B97F4A7C15 + token_id * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & MASK


def digests(token_ids: Iterable[int], parent: int = 0) -> list[int]:
    """Return, for each position, the digest of the ids up to and including it."""
    out: list[int] = []
    for token_id in token_ids:
        parent = extend(parent, token_id)
        out.append(parent)
    return out


def content(digest: int, layer: int) -> int:
    """Return the cache content of a layer at a position with this digest. Never zero, which is memory never written."""
    return (digest ^ (layer + 1) * 0x2545F4914F6CDD1D) | 1


def weights_number(weights: str, dtype: str) -> int:
    """Return a number that tokens depend on besides ids, seed and position; 0 for the usual weights."""
    return 0 if (weights, dtype) == (USUAL_WEIGHTS, USUAL_DTYPE) else crc32(f"{weights} {dtype}".encode())


def draw(digest: int, seed: int, position: int, weights: int = 0) -> int:
    """Sample the token at absolute `position` after a prefix with this digest."""
    mixed = (digest ^ weights ^ seed * 0xBF58476D1CE4E5B9 ^ position * 0x94D049BB133111EB) & MASK
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & MASK
    return (mixed ^ mixed >> 32) % VOCAB_SIZE


def undisturbed(prompt_token_ids: "array[int]", sampling: SamplingParams, weights: int = 0) -> tuple[int, ...]:
    """Return all output ids of a request without any fault."""
    digest = 0
    for token_id in prompt_token_ids:
        digest = extend(digest, token_id)
    out: list[int] = []
    while len(out) < sampling.max_new_tokens:
        token_id = draw(digest, sampling.seed, len(prompt_token_ids) + len(out), weights)
        out.append(token_id)
        if not sampling.ignore_eos and (token_id == EOS_TOKEN_ID or token_id in sampling.stop_token_ids):
            break
        digest = extend(digest, token_id)
    return tuple(out)
