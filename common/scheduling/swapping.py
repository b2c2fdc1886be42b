"""Swaps the KV of decoding sequences to the host and back. Pure. `PreemptionPolicy` decides which and when.

Swap-out: the copy is part of a step. The sequence holds its device blocks until that step's result is back, because
only then has the engine read them, and only then may the engine or a transport write them for another sequence.
Swap-in: the target blocks are free, so no step uses them. The runner copies before it computes, so the same step may
compute the sequence. The host blocks are held until that step's result is back.
Leading blocks that are still in the prefix cache are shared, not copied.
"""

from kvferry.common.base.errors import InvariantError
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.kv.host_pool import HostPool
from kvferry.common.scheduling.sequence import Sequence, SequenceStatus
from kvferry.common.scheduling.sequence_table import SequenceTable
from kvferry.common.scheduling.step import BlockCopies, StepBatch
from kvferry.common.scheduling.step_builder import StepBuilder


class Swapping:
    """Moves sequences between DECODING, SWAPPING and SWAPPED."""

    def __init__(self, pool: BlockPool, host: HostPool, table: SequenceTable) -> None:
        self._pool = pool
        self._host = host
        self._table = table
        self.num_swaps = 0
        """Number of swap-outs since start."""
        self._refused: tuple[int, int, int] | None = None
        """(seq_id, keep_free, pool.num_releases) of the last refused swap-in: not retried before a release."""

    @property
    def num_pending_blocks(self) -> int:
        """Device blocks that become free when the swap-outs in flight are done."""
        return sum(self._pool.num_exclusive(seq_id) for seq_id in self._table.members(SequenceStatus.SWAPPING))

    def swap_out(self, seq: Sequence, builder: StepBuilder, now: float) -> bool:
        """Copy a DECODING sequence, unused by any step or transport, to the host. False: no free host blocks."""
        num_blocks = self._pool.blocks_for(seq.num_computed_tokens)
        host_blocks = self._host.allocate(seq.seq_id, num_blocks)
        if host_blocks is None:
            return False
        self._table.move(seq, SequenceStatus.SWAPPING)
        seq.steps_in_flight += 1
        seq.swapped_at = now
        builder.swap_out.append(BlockCopies(seq.seq_id, self._pool.table(seq.seq_id)[:num_blocks], host_blocks))
        self.num_swaps += 1
        return True

    def num_needed(self, seq: Sequence) -> int:
        """Free device blocks that the swap-in of a SWAPPED sequence takes."""
        num_tokens = seq.num_computed_tokens
        return self._pool.num_needed(seq.token_ids[:num_tokens], max_cached_tokens=num_tokens, extra_tokens=1)

    def swap_in(self, seq: Sequence, builder: StepBuilder, keep_free: int) -> bool:
        """Swap a SWAPPED sequence in, with a block for its next token. False: fewer than keep_free would stay free."""
        attempt = (seq.seq_id, keep_free, self._pool.num_releases)
        if self._refused == attempt:
            return False
        num_tokens = seq.num_computed_tokens
        table = self._pool.acquire(
            seq.seq_id,
            seq.token_ids[:num_tokens],
            max_cached_tokens=num_tokens,
            extra_tokens=1,
            keep_free=keep_free,
            update_stats=False,
        )
        if table is None:
            self._refused = attempt
            return False
        first, end = table.num_cached_tokens // self._pool.block_size, self._pool.blocks_for(num_tokens)
        self._table.move(seq, SequenceStatus.DECODING)
        seq.steps_in_flight += 1
        host_blocks = self._host.table(seq.seq_id)
        builder.swap_in.append(BlockCopies(seq.seq_id, table.block_ids[first:end], host_blocks[first:end]))
        return True

    def apply(self, batch: StepBatch) -> None:
        """Release the sources of a step's copies, also those of sequences that have ended since."""
        for copies in batch.swap_out:
            seq = self._table.get(copies.seq_id)
            seq.steps_in_flight -= 1
            if seq.status is SequenceStatus.SWAPPING:
                self._pool.release(seq.seq_id)
                self._table.move(seq, SequenceStatus.SWAPPED)
            self._table.settle(seq)
        for copies in batch.swap_in:
            seq = self._table.get(copies.seq_id)
            seq.steps_in_flight -= 1
            self._host.release(seq.seq_id)
            self._table.settle(seq)

    def check_invariants(self, in_flight: list[StepBatch]) -> None:
        """Raise InvariantError when the copies in flight and the holders of host blocks disagree."""
        self._host.check_invariants()
        copied = {copies.seq_id for batch in in_flight for copies in (*batch.swap_out, *batch.swap_in)}
        swapped = {*self._table.members(SequenceStatus.SWAPPING), *self._table.members(SequenceStatus.SWAPPED)}
        if self._host.holders != copied | swapped:
            raise InvariantError("swapping: holders of host blocks are not the sequences swapped or being copied")
        for copies in (copies for batch in in_flight for copies in batch.swap_out):
            if self._pool.table(copies.seq_id)[: len(copies.device_blocks)] != copies.device_blocks:
                raise InvariantError(f"swapping: sequence {copies.seq_id} is copied from blocks that it does not hold")
        for copies in (copies for batch in in_flight for copies in batch.swap_in):
            if not set(copies.device_blocks) <= set(self._pool.table(copies.seq_id)):
                raise InvariantError(f"swapping: sequence {copies.seq_id} is copied to blocks that it does not hold")
        for seq in self._table.members(SequenceStatus.SWAPPED).values():
            if len(self._host.table(seq.seq_id)) != self._pool.blocks_for(seq.num_computed_tokens):
                raise InvariantError(f"swapping: sequence {seq.seq_id} has fewer host blocks than computed tokens need")
