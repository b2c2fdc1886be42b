"""Decode steps (one token for each sequence) recorded as device graphs for a table of sizes, and replayed.

A step uses the smallest recorded size that it fits into. Padding rows compute one token each, at a slot of their own in
the scratch blocks; their results are ignored. Inputs and hidden states have fixed addresses. Does not schedule.
"""

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvferry.common.device.base import Device
from kvferry.common.device.graphs import Graph, Graphs
from kvferry.common.engine.batch import InputBatch, make_batch
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.engine.step_buffers import InputBuffers, StepShape
from kvferry.common.models.family import CausalLM
from kvferry.common.scheduling.step import ScheduledSequence

_LOG = logging.getLogger("kvferry.engine")
_MIN_WIDTH_TOKENS = 512
"""Block tables of at most this many tokens are not halved further: their attention costs next to nothing."""


@dataclass(frozen=True, slots=True, order=True)
class GraphSize:
    """Largest step that a graph serves: number of sequences, and blocks of each."""

    sequences: int
    width: int

    @property
    def shape(self) -> StepShape:
        """Shape of the graph's inputs."""
        return StepShape(self.sequences, self.sequences, self.width)


def graph_sizes(batches: Sequence[int], max_blocks: int, block_size: int, most_tokens: int) -> tuple[GraphSize, ...]:
    """Each of `batches` with tables of `max_blocks`, half of that, a quarter and so on, up to `most_tokens` tokens."""
    widths = [max_blocks]
    while widths[-1] * block_size > _MIN_WIDTH_TOKENS:
        widths.append(-(-widths[-1] // 2))
    sizes = (GraphSize(sequences, width) for sequences in sorted(set(batches)) for width in reversed(widths))
    return tuple(size for size in sizes if size.sequences * size.width * block_size <= most_tokens)


def num_scratch_blocks(sizes: Sequence[GraphSize], block_size: int) -> int:
    """Blocks that give every row of the largest batch its own slot: while recording, all rows are padding."""
    return -(-max((size.sequences for size in sizes), default=0) // block_size)


class DecodeGraphs:
    """The recorded steps of one model over one cache that has scratch blocks. Used by the runner's thread."""

    def __init__(
        self, model: CausalLM, cache: KvCache, device: Device, graphs: Graphs, sizes: Sequence[GraphSize]
    ) -> None:
        """Records nothing yet. `sizes` must not be empty."""
        self._model = model
        self._cache = cache
        self._device = device
        self._graphs = graphs
        self._sizes = tuple(sorted(sizes))
        """In order of preference: fewest rows first, then shortest tables."""
        self._buffers = InputBuffers(device)
        self._buffers.reserve(size.shape for size in sizes)
        max_sequences = self._sizes[-1].sequences
        self._hidden = torch.zeros(
            max_sequences, model.config.hidden_size, dtype=cache.specs[0].dtype, device=device.torch_device
        )
        self._padding = tuple(_padding(row, cache) for row in range(max_sequences))
        self._recorded: dict[GraphSize, Graph] = {}

    def measure(self) -> int:
        """Estimate the device bytes that recording every size takes, by recording the two largest.

        Raises RuntimeError when a step cannot be recorded.
        """
        free = [self._device.memory_info()[0]]
        for size in self._largest_first()[:2]:
            self._recorded[size] = self._record(size)
            free.append(self._device.memory_info()[0])
        taken = [before - after for before, after in pairwise(free)]
        return max(0, taken[0] + (len(self._sizes) - 1) * taken[-1])

    def record(self) -> None:
        """Record every size. Sizes that fail are logged and dropped from the table; their steps are computed."""
        failed: list[GraphSize] = []
        for size in self._largest_first():
            try:
                self._recorded[size] = self._record(size)
            except RuntimeError as error:
                if not failed:
                    _LOG.warning("a step of %d sequences cannot be recorded: %s", size.sequences, error)
                failed.append(size)
        self._sizes = tuple(size for size in self._sizes if size not in failed)
        _LOG.info("recorded decode steps of %d sizes; %d sizes failed", len(self._sizes), len(failed))

    def forward(self, scheduled: Sequence[ScheduledSequence]) -> tuple[InputBatch, Tensor] | None:
        """Replay a step: the batch and its hidden states (padding rows included), valid until the next call.

        Returns None when no recorded size fits.
        """
        size = self._size_for(scheduled)
        if size is None:
            return None
        batch = self._fill(scheduled, size)
        self._recorded[size].replay(batch.meta.seq_lens)
        return batch, self._hidden[: size.sequences]

    def _largest_first(self) -> list[GraphSize]:
        # Smaller graphs reuse the memory pool that the largest one has allocated.
        return sorted(self._sizes, key=lambda size: (size.sequences * size.width, size.sequences), reverse=True)

    def _size_for(self, scheduled: Sequence[ScheduledSequence]) -> GraphSize | None:
        if any(len(sequence.token_ids) != 1 for sequence in scheduled):
            return None
        width = max(len(sequence.block_table) for sequence in scheduled)
        fitting = (size for size in self._sizes if size.sequences >= len(scheduled) and size.width >= width)
        return next(fitting, None)

    def _fill(self, scheduled: Sequence[ScheduledSequence], size: GraphSize) -> InputBatch:
        filled = (*scheduled, *self._padding[: size.sequences - len(scheduled)])
        return make_batch(filled, self._cache.block_size, self._buffers, size.width)

    def _record(self, size: GraphSize) -> Graph:
        with torch.inference_mode():
            batch = self._fill((), size)
            longest = size.width * self._cache.block_size
            meta = replace(batch.meta, seq_lens=(longest,) * size.sequences)
            out = self._hidden[: size.sequences]
            self._device.synchronize()

            def step() -> None:
                out.copy_(self._model.forward(batch.token_ids, batch.positions, self._cache.layers, meta))

            return self._graphs.capture(step)


def _padding(row: int, cache: KvCache) -> ScheduledSequence:
    """A padding row: no request's sequence, with one token at the row's own scratch slot."""
    block, offset = divmod(row, cache.block_size)
    return ScheduledSequence(-1, array("I", [0]), offset, (cache.scratch_blocks[block],), False)
