"""A step batch as flat tensors: concatenated sequences, prefill chunks and decode tokens alike. Computes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvferry.common.device.ops import AttentionMetadata
from kvferry.common.engine.step_buffers import InputBuffers, StepShape
from kvferry.common.scheduling.step import ScheduledSequence


@dataclass(frozen=True, slots=True)
class InputBatch:
    """T tokens of N sequences on the device, of which n are sampled."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute."""
    meta: AttentionMetadata
    sampled_rows: Tensor
    """[n] int64: the last token of every sequence that is sampled."""
    sampled_ids: tuple[int, ...]
    sampled_positions: tuple[int, ...]
    """[n] absolute positions of the tokens to be sampled."""


def make_batch(
    scheduled: Sequence[ScheduledSequence], block_size: int, buffers: InputBuffers, min_width: int = 0
) -> InputBatch:
    """Lay out one or more scheduled sequences. The result is valid until `buffers` is used again.

    `min_width`: least number of columns of the block tables. Raises ValueError when a block table does not cover the
    tokens of its sequence.
    """
    counts = np.array([len(sequence.token_ids) for sequence in scheduled])
    starts = np.array([sequence.start_position for sequence in scheduled])
    offsets = np.concatenate(([0], counts.cumsum()))
    width = max(min_width, *(len(sequence.block_table) for sequence in scheduled))
    shape = StepShape(int(offsets[-1]), len(scheduled), width)
    host = buffers.host_views(shape)
    _fill_tables(host.block_tables, scheduled, block_size)
    np.subtract(np.arange(shape.tokens), np.repeat(offsets[:-1] - starts, counts), out=host.positions)
    blocks, offsets_in_block = np.divmod(host.positions, block_size)
    rows = np.repeat(np.arange(len(scheduled)), counts)
    np.add(host.block_tables[rows, blocks] * np.int64(block_size), offsets_in_block, out=host.slots)
    np.concatenate([np.frombuffer(one.token_ids, dtype=np.uint32) for one in scheduled], out=host.token_ids)
    np.add(starts, counts, out=host.lengths)
    sampled = [(index, sequence) for index, sequence in enumerate(scheduled) if sequence.sample]
    host.sampled_rows[: len(sampled)] = [int(offsets[index + 1]) - 1 for index, _ in sampled]
    inputs = buffers.send(shape)
    return InputBatch(
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        meta=AttentionMetadata(
            query_start_loc=tuple(offsets.tolist()),
            seq_lens=tuple(host.lengths.tolist()),
            block_tables=inputs.block_tables,
            slot_mapping=inputs.slots,
            block_size=block_size,
            lengths=inputs.lengths,
        ),
        sampled_rows=inputs.sampled_rows[: len(sampled)],
        sampled_ids=tuple(sequence.seq_id for _, sequence in sampled),
        sampled_positions=tuple(sequence.seed_position for _, sequence in sampled),
    )


def _fill_tables(tables: NDArray[np.int32], scheduled: Sequence[ScheduledSequence], block_size: int) -> None:
    """Fill `tables` [N, W], padded with 0."""
    tables.fill(0)
    for row, sequence in enumerate(scheduled):
        count, end = len(sequence.token_ids), sequence.start_position + len(sequence.token_ids)
        if not count or end > len(sequence.block_table) * block_size:
            raise ValueError(
                f"sequence {sequence.seq_id}: {count} tokens up to {end}, with {len(sequence.block_table)} blocks"
            )
        tables[row, : len(sequence.block_table)] = sequence.block_table
