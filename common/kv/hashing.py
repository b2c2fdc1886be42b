"""Prefix hashes, chained over blocks of token ids and seeded with the model's identity. Pure.

Stable across processes and machines, so never Python's `hash()`. A hash only finds a candidate: the caller must compare
the ids too.
"""

import sys
from array import array
from hashlib import blake2b

DIGEST_BYTES = 16


def token_bytes(token_ids: "array[int]") -> bytes:
    """Ids (typecode 'I') as little-endian uint32, 4 bytes each, on any machine."""
    if sys.byteorder == "little":
        return token_ids.tobytes()
    swapped = array("I", token_ids)
    swapped.byteswap()
    return swapped.tobytes()


def root(model_identity: str, cache_salt: str = "", adapter: str = "") -> bytes:
    """First parent of a model's hash chains: caches of different models, salts or adapters share no hash."""
    parts = (model_identity, cache_salt, adapter)
    data = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in parts)
    return blake2b(b"kvferry-prefix-2\0" + data, digest_size=DIGEST_BYTES).digest()


def chain_bytes(parent: bytes, data: bytes) -> bytes:
    """Like `chain`, for ids already in `token_bytes` form. The parent's fixed length makes the input unambiguous."""
    return blake2b(parent + data, digest_size=DIGEST_BYTES).digest()


def chain(parent: bytes, token_ids: "array[int]") -> bytes:
    """Digest (16 bytes) of a block of ids. `parent`: the digest of everything before it, or `root`."""
    return chain_bytes(parent, token_bytes(token_ids))
