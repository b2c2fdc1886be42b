"""A step plan as flat tensors: sequences laid end to end, prefill chunks and decode tokens alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.device.base import AttentionMetadata
from common.scheduling.step import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Batch:
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


def make_batch(scheduled: Sequence[ScheduledSequence], block_size: int, device: torch.device) -> Batch:
    """Lay out at least one scheduled sequence. Raises ValueError when a block table does not cover its tokens."""
    counts = np.array([len(sequence.token_ids) for sequence in scheduled])
    starts = np.array([sequence.start_position for sequence in scheduled])
    offsets = np.concatenate(([0], counts.cumsum()))
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, counts)
    tables = _block_tables(scheduled, block_size)
    owners = np.repeat(np.arange(len(scheduled)), counts)
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    ids = np.concatenate([np.frombuffer(sequence.token_ids, dtype=np.uint32) for sequence in scheduled])
    rows = [int(offsets[index + 1]) - 1 for index, sequence in enumerate(scheduled) if sequence.sample]
    sampled = [sequence for sequence in scheduled if sequence.sample]
    meta = AttentionMetadata(
        query_start_loc=tuple(offsets.tolist()),
        seq_lens=tuple((starts + counts).tolist()),
        block_tables=torch.from_numpy(tables).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        block_size=block_size,
    )
    return Batch(
        token_ids=torch.from_numpy(ids.astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device),
        meta=meta,
        sampled_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        sampled_ids=tuple(sequence.seq_id for sequence in sampled),
        sampled_positions=tuple(sequence.seed_position for sequence in sampled),
    )


def _block_tables(
    scheduled: Sequence[ScheduledSequence], block_size: int
) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
    """[N, longest table] int32, padded with 0."""
    tables = np.zeros((len(scheduled), max(len(sequence.block_table) for sequence in scheduled)), dtype=np.int32)
    for row, sequence in enumerate(scheduled):
        count, end = len(sequence.token_ids), sequence.start_position + len(sequence.token_ids)
        if not count or end > len(sequence.block_table) * block_size:
            raise ValueError(
                f"sequence {sequence.seq_id}: {count} tokens up to {end}, with {len(sequence.block_table)} blocks"
            )
        tables[row, : len(sequence.block_table)] = sequence.block_table
    return tables
