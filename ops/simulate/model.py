"""The simulated model: which token follows which, and what the KV cache of a position must hold. Pure functions.

Everything depends on all ids so far, so whatever is computed from a wrong or stale cache cannot look right.
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
    """Digest of a prefix from that of all but its last id."""
    return (parent * 0x9E3779B97F4A7C15 + token_id * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & MASK


def digests(token_ids: Iterable[int], parent: int = 0) -> list[int]:
    """For each position the digest of the ids up to and including it."""
    out: list[int] = []
    for token_id in token_ids:
        parent = extend(parent, token_id)
        out.append(parent)
    return out


def content(digest: int, layer: int) -> int:
    """What a layer's cache holds at a position with this digest. Never zero: that is memory that was never written."""
    return (digest ^ (layer + 1) * 0x2545F4914F6CDD1D) | 1


def weights_number(weights: str, dtype: str) -> int:
    """What the tokens depend on besides; 0 for the usual weights."""
    return 0 if (weights, dtype) == (USUAL_WEIGHTS, USUAL_DTYPE) else crc32(f"{weights} {dtype}".encode())


def draw(digest: int, seed: int, position: int, weights: int = 0) -> int:
    """The token at `position` (an absolute one) after a prefix with this digest."""
    mixed = (digest ^ weights ^ seed * 0xBF58476D1CE4E5B9 ^ position * 0x94D049BB133111EB) & MASK
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & MASK
    return (mixed ^ mixed >> 32) % VOCAB_SIZE


def undisturbed(prompt_token_ids: "array[int]", sampling: SamplingParams, weights: int = 0) -> tuple[int, ...]:
    """All output ids of a request when nothing happens to it."""
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
