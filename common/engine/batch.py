"""A step plan as flat tensors: sequences laid end to end, prefill chunks and decode tokens alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvferry.common.device.ops import AttentionMetadata
from kvferry.common.engine.staging import Staging, StepInputs, StepShape
from kvferry.common.scheduling.step import ScheduledSequence


@dataclass(frozen=True, slots=True)
class InputBatch:
    """T tokens of N sequences, on the device."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute."""
    meta: AttentionMetadata
    sampled_rows: Tensor
    """[n] int64: the last token of every sequence that is sampled."""
    sampled_ids: tuple[int, ...]
    sampled_positions: tuple[int, ...]
    """[n] absolute positions of the tokens to be drawn."""


def make_batch(scheduled: Sequence[ScheduledSequence], block_size: int, staging: Staging, width: int = 0) -> InputBatch:
    """Lay out at least one scheduled sequence; good until `staging` is used again.

    `width`: blocks that each table has room for, where that is more than the longest has. Raises ValueError when a
    block table does not cover its tokens.
    """
    counts = np.array([len(sequence.token_ids) for sequence in scheduled])
    starts = np.array([sequence.start_position for sequence in scheduled])
    offsets = np.concatenate(([0], counts.cumsum()))
    width = max(width, *(len(sequence.block_table) for sequence in scheduled))
    shape = StepShape(int(offsets[-1]), len(scheduled), width)
    host = staging.place(shape)
    _fill_tables(host.block_tables, scheduled, block_size)
    np.subtract(np.arange(shape.tokens), np.repeat(offsets[:-1] - starts, counts), out=host.positions)
    blocks, places = np.divmod(host.positions, block_size)
    owners = np.repeat(np.arange(len(scheduled)), counts)
    np.add(host.block_tables[owners, blocks] * np.int64(block_size), places, out=host.slots)
    np.concatenate([np.frombuffer(one.token_ids, dtype=np.uint32) for one in scheduled], out=host.token_ids)
    np.add(starts, counts, out=host.lengths)
    rows = [int(offsets[index + 1]) - 1 for index, sequence in enumerate(scheduled) if sequence.sample]
    host.sampled_rows[: len(rows)] = rows
    there = staging.send(shape)
    meta = AttentionMetadata(
        query_start_loc=tuple(offsets.tolist()),
        seq_lens=tuple(host.lengths.tolist()),
        block_tables=there.block_tables,
        slot_mapping=there.slots,
        block_size=block_size,
        lengths=there.lengths,
    )
    return batch_of(scheduled, there, meta)


def batch_of(scheduled: Sequence[ScheduledSequence], there: StepInputs, meta: AttentionMetadata) -> InputBatch:
    """Inputs that have been sent, with what of the plan is kept on the host."""
    sampled = [sequence for sequence in scheduled if sequence.sample]
    return InputBatch(
        token_ids=there.token_ids,
        positions=there.positions,
        meta=meta,
        sampled_rows=there.sampled_rows[: len(sampled)],
        sampled_ids=tuple(sequence.seq_id for sequence in sampled),
        sampled_positions=tuple(sequence.seed_position for sequence in sampled),
    )


def _fill_tables(tables: NDArray[np.int32], scheduled: Sequence[ScheduledSequence], block_size: int) -> None:
    """[N, W], padded with 0."""
    tables.fill(0)
    for row, sequence in enumerate(scheduled):
        count, end = len(sequence.token_ids), sequence.start_position + len(sequence.token_ids)
        if not count or end > len(sequence.block_table) * block_size:
            raise ValueError(
                f"sequence {sequence.seq_id}: {count} tokens up to {end}, with {len(sequence.block_table)} blocks"
            )
        tables[row, : len(sequence.block_table)] = sequence.block_table
