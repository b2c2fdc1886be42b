"""Digests that show whether two hosts hold the same model, without reading all of it. Independent of paths."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from kvferry.common.device.quantize import WeightScheme
from kvferry.common.models.config import TransformerConfig

_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 14
_SAMPLES = 64


def weights_version(files: Iterable[Path], scheme: WeightScheme | None = None) -> str:
    """sha256 over, for each file in order, its size, its head and evenly spaced samples.

    Weights that were rounded to fewer bits are another version: their tokens differ.
    """
    digest = hashlib.sha256((scheme or "").encode())
    for path in files:
        _add_file(digest, path)
    return digest.hexdigest()


def model_identity(config: TransformerConfig, weights: str) -> str:
    """sha256 over the configuration and the version of the weights."""
    return hashlib.sha256(f"{config.digest()}{weights}".encode()).hexdigest()


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for index in range(_SAMPLES):
            file.seek(max(size - _SAMPLE_BYTES, 0) * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
