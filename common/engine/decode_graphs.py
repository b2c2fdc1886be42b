"""Steps in which every sequence gets one token, recorded for a table of sizes and replayed. Decides no order.

A step takes the smallest size that it fits into. Rows that fill up the batch have one token each, in a place of their
own in scratch blocks; nobody looks at what comes of them. Inputs and hidden states lie at fixed places.
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
from kvferry.common.engine.staging import Staging, StepShape
from kvferry.common.models.family import CausalLM
from kvferry.common.scheduling.step import ScheduledSequence

_LOG = logging.getLogger("kvferry.engine")
_LEAST_WIDTH_TOKENS = 512
"""Tables this short are not cut any shorter: their attention takes no time."""


@dataclass(frozen=True, slots=True, order=True)
class GraphSize:
    """Of a recorded step: at most so many sequences, with at most so many blocks each."""

    sequences: int
    width: int

    @property
    def shape(self) -> StepShape:
        """Of its inputs."""
        return StepShape(self.sequences, self.sequences, self.width)


def graph_sizes(batches: Sequence[int], max_blocks: int, block_size: int, most_tokens: int) -> tuple[GraphSize, ...]:
    """Each of `batches` with tables of `max_blocks`, half of that, a quarter and so on; of most_tokens at most."""
    widths = [max_blocks]
    while widths[-1] * block_size > _LEAST_WIDTH_TOKENS:
        widths.append(-(-widths[-1] // 2))
    sizes = (GraphSize(sequences, width) for sequences in sorted(set(batches)) for width in reversed(widths))
    return tuple(size for size in sizes if size.sequences * size.width * block_size <= most_tokens)


def num_scratch_blocks(sizes: Sequence[GraphSize], block_size: int) -> int:
    """So many that every row of the largest batch has a place of its own: recording fills it up wholly."""
    return -(-max((size.sequences for size in sizes), default=0) // block_size)


class DecodeGraphs:
    """The recorded steps of one model over one cache, which has scratch blocks for them. Used like the runner."""

    def __init__(
        self, model: CausalLM, cache: KvCache, device: Device, graphs: Graphs, sizes: Sequence[GraphSize]
    ) -> None:
        """Nothing is recorded yet. `sizes`: at least one."""
        self._model = model
        self._cache = cache
        self._device = device
        self._graphs = graphs
        self._sizes = tuple(sorted(sizes))
        """By what a step takes first: as few rows as it can have, then as short tables."""
        self._staging = Staging(device)
        self._staging.reserve(size.shape for size in sizes)
        most = self._sizes[-1].sequences
        self._hidden = torch.zeros(
            most, model.config.hidden_size, dtype=cache.specs[0].dtype, device=device.torch_device
        )
        self._padding = tuple(_padding(row, cache) for row in range(most))
        self._recorded: dict[GraphSize, Graph] = {}

    def measure(self) -> int:
        """Bytes of the device that recording every size takes, found out by recording two. RuntimeError: it cannot."""
        free = [self._device.memory_info()[0]]
        for size in self._largest_first()[:2]:
            self._recorded[size] = self._record(size)
            free.append(self._device.memory_info()[0])
        taken = [before - after for before, after in pairwise(free)]
        return max(0, taken[0] + (len(self._sizes) - 1) * taken[-1])

    def record(self) -> None:
        """Record every size. Those that cannot be are told of, and computed as if they were not in the table."""
        failed: list[GraphSize] = []
        for size in self._largest_first():
            try:
                self._recorded[size] = self._record(size)
            except RuntimeError as error:
                if not failed:
                    _LOG.warning("a step of %d sequences cannot be recorded: %s", size.sequences, error)
                failed.append(size)
        self._sizes = tuple(size for size in self._sizes if size not in failed)
        _LOG.info("sizes of decode steps that are recorded: %d; that could not be: %d", len(self._sizes), len(failed))

    def forward(self, scheduled: Sequence[ScheduledSequence]) -> tuple[InputBatch, Tensor] | None:
        """The batch and its hidden states, more rows than it has sequences; None where nothing recorded fits.

        Both are good until the next call.
        """
        size = self._size_for(scheduled)
        if size is None:
            return None
        batch = self._fill(scheduled, size)
        self._recorded[size].replay(batch.meta.seq_lens)
        return batch, self._hidden[: size.sequences]

    def _largest_first(self) -> list[GraphSize]:
        """The others find room in the memory that it has taken."""
        return sorted(self._sizes, key=lambda size: (size.sequences * size.width, size.sequences), reverse=True)

    def _size_for(self, scheduled: Sequence[ScheduledSequence]) -> GraphSize | None:
        if any(len(sequence.token_ids) != 1 for sequence in scheduled):
            return None
        width = max(len(sequence.block_table) for sequence in scheduled)
        fitting = (size for size in self._sizes if size.sequences >= len(scheduled) and size.width >= width)
        return next(fitting, None)

    def _fill(self, scheduled: Sequence[ScheduledSequence], size: GraphSize) -> InputBatch:
        filled = (*scheduled, *self._padding[: size.sequences - len(scheduled)])
        return make_batch(filled, self._cache.block_size, self._staging, size.width)

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
    """A sequence of nobody's: its newest token is in this row's place."""
    block, offset = divmod(row, cache.block_size)
    return ScheduledSequence(-1, array("I", [0]), offset, (cache.scratch_blocks[block],), False)
