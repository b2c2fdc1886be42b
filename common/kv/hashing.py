"""Prefix hashes: stable across processes and machines, chained over token ids from the model's identity.

Never Python's own `hash()`. A hash only finds a candidate: whoever acts on a hit compares the ids as well.
"""

import sys
from array import array
from hashlib import blake2b

DIGEST_BYTES = 16


def token_bytes(token_ids: "array[int]") -> bytes:
    """Ids of typecode 'I' as little-endian uint32, 4 bytes each, whatever the machine."""
    if sys.byteorder == "little":
        return token_ids.tobytes()
    swapped = array("I", token_ids)
    swapped.byteswap()
    return swapped.tobytes()


def root(model_identity: str) -> bytes:
    """Where the chains of a model begin: caches of two models have no hash in common."""
    return blake2b(b"kvferry-prefix-1\0" + model_identity.encode(), digest_size=DIGEST_BYTES).digest()


def chain_bytes(parent: bytes, data: bytes) -> bytes:
    """Like `chain`, for ids that are `token_bytes` already. The parent has a fixed length: nothing is ambiguous."""
    return blake2b(parent + data, digest_size=DIGEST_BYTES).digest()


def chain(parent: bytes, token_ids: "array[int]") -> bytes:
    """Digest (16 bytes) of a block of ids that follows `parent`, the digest of all before it or `root`."""
    return chain_bytes(parent, token_bytes(token_ids))
