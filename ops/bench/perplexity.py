"""Measures the perplexity of a text, with full weights and with each quantization, in one run.

The text is cut into windows; each token of a window but the first is predicted from those before it. Uses the node's
model code and KV cache; samples nothing.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch.nn import functional
from tqdm import tqdm

from kvferry.common.device.base import Device
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.engine.batch import make_batch
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.engine.step_buffers import InputBuffers
from kvferry.common.models.load import DtypeName, LoadedModel, load_model
from kvferry.common.scheduling.step import ScheduledSequence

SCHEMES: tuple[WeightScheme | None, ...] = (None, "int8", "int4", "int8_dynamic")
_BLOCK_SIZE = 16


class Perplexity(msgspec.Struct, frozen=True):
    """Result of one quantization."""

    quantization: str
    perplexity: float
    over_full: float
    """Relative increase over the full weights: 0.01 is one percent."""


class PerplexityReport(msgspec.Struct, frozen=True):
    """One run over one text."""

    model: str
    dtype: str
    text: str
    tokens: int
    results: list[Perplexity]


def run_perplexity(
    path: Path, device: Device, dtype: DtypeName | None, text: tuple[str, Sequence[int]], window: int, progress: bool
) -> PerplexityReport:
    """Load the model once for each scheme. `text`: name and token ids. Raises ModelLoadError."""
    device.activate_thread()
    name, ids = text
    results: list[Perplexity] = []
    dtype_name = ""
    for scheme in SCHEMES:
        loaded = load_model(path, device=device, dtype=dtype, progress=progress, scheme=scheme)
        dtype_name = str(loaded.dtype).removeprefix("torch.")
        value = math.exp(_mean_loss(loaded, device, ids, min(window, loaded.info.max_model_len), progress))
        full = results[0].perplexity if results else value
        results.append(Perplexity(scheme or "none", round(value, 4), round(value / full - 1, 5)))
    return PerplexityReport(path.resolve().stem, dtype_name, name, len(ids), results)


def perplexity_table(report: PerplexityReport) -> Iterator[str]:
    """The report as lines of text."""
    yield f"{report.model}  {report.dtype}  {report.tokens} tokens of {report.text}"
    for result in report.results:
        yield f"weights {result.quantization:<13} perplexity {result.perplexity:9.4f}  {result.over_full:+8.2%}"


def _mean_loss(loaded: LoadedModel, device: Device, ids: Sequence[int], window: int, progress: bool) -> float:
    """Mean negative log-likelihood per token, without the first token of each window."""
    block_size = device.supported_block_size(_BLOCK_SIZE)
    blocks = -(-window // block_size)
    cache = KvCache(device, loaded.kv_specs, loaded.config.num_layers, blocks, block_size)
    staging = InputBuffers(device)
    starts = range(0, len(ids) - 1, window)
    total = 0.0
    for start in tqdm(starts, desc="windows", unit="window", disable=not progress):
        tokens = array("I", ids[start : start + window])
        sequence = ScheduledSequence(1, tokens, 0, tuple(range(blocks)), True, len(tokens))
        batch = make_batch([sequence], block_size, staging)
        with torch.inference_mode():
            hidden = loaded.model.forward(batch.token_ids, batch.positions, cache.layers, batch.meta)
            logits = loaded.model.logits(hidden[:-1])
            total += float(functional.cross_entropy(logits, batch.token_ids[1:], reduction="sum"))
    return total / (len(ids) - len(starts))
