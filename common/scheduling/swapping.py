"""How KV of a decoding sequence goes to the host and comes back. Decides nothing about who and when (`room.py`).

Out: the copy is part of a step, and the device's blocks are the sequence's own until that step has come back: only
then has the engine read them, and only then may the engine, or a transport, write them for somebody else.
In: into free blocks, which nobody touches; the copy is done before anything of the same step is computed, so the
sequence may be part of it. The host blocks are kept until that step has come back.
What the prefix cache still has of it is taken from there and not copied.
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
        """Sequences swapped out, total since start."""
        self._refused: tuple[int, int, int] | None = None
        """(seq_id, keep_free, pool.num_releases) when there was no room: not to be tried again before a release."""

    @property
    def num_coming_blocks(self) -> int:
        """Device blocks that are free when the copies in flight are done."""
        return sum(self._pool.num_exclusive(seq_id) for seq_id in self._table.members(SequenceStatus.SWAPPING))

    def swap_out(self, seq: Sequence, batch: StepBuilder, now: float) -> bool:
        """Copy a DECODING sequence, which no step or transport touches, to the host. False: no room there."""
        num_blocks = self._pool.blocks_for(seq.num_computed_tokens)
        host_blocks = self._host.take(seq.seq_id, num_blocks)
        if host_blocks is None:
            return False
        self._table.move(seq, SequenceStatus.SWAPPING)
        seq.steps_in_flight += 1
        seq.swapped_at = now
        batch.swap_out.append(BlockCopies(seq.seq_id, self._pool.table(seq.seq_id)[:num_blocks], host_blocks))
        self.num_swaps += 1
        return True

    def num_wanted(self, seq: Sequence) -> int:
        """Free blocks that the return of a SWAPPED sequence takes."""
        num_tokens = seq.num_computed_tokens
        return self._pool.num_wanted(seq.token_ids[:num_tokens], max_cached_tokens=num_tokens, extra_tokens=1)

    def swap_in(self, seq: Sequence, batch: StepBuilder, keep_free: int) -> bool:
        """Bring a SWAPPED sequence back, with room for its next token. False: that would leave fewer free blocks."""
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
            counted=False,
        )
        if table is None:
            self._refused = attempt
            return False
        first, end = table.num_cached_tokens // self._pool.block_size, self._pool.blocks_for(num_tokens)
        self._table.move(seq, SequenceStatus.DECODING)
        seq.steps_in_flight += 1
        host_blocks = self._host.table(seq.seq_id)
        batch.swap_in.append(BlockCopies(seq.seq_id, table.block_ids[first:end], host_blocks[first:end]))
        return True

    def apply(self, plan: StepBatch) -> None:
        """The copies of a step are done: what they read is let go, also that of sequences that ended meanwhile."""
        for copies in plan.swap_out:
            seq = self._table.get(copies.seq_id)
            seq.steps_in_flight -= 1
            if seq.status is SequenceStatus.SWAPPING:
                self._pool.release(seq.seq_id)
                self._table.move(seq, SequenceStatus.SWAPPED)
            self._table.settle(seq)
        for copies in plan.swap_in:
            seq = self._table.get(copies.seq_id)
            seq.steps_in_flight -= 1
            self._host.release(seq.seq_id)
            self._table.settle(seq)

    def check_invariants(self, plans: list[StepBatch]) -> None:
        """Copies of the plans in flight and holders of host blocks agree. Raises InvariantError."""
        self._host.check_invariants()
        copied = {copies.seq_id for plan in plans for copies in (*plan.swap_out, *plan.swap_in)}
        away = {*self._table.members(SequenceStatus.SWAPPING), *self._table.members(SequenceStatus.SWAPPED)}
        if self._host.holders != copied | away:
            raise InvariantError("swapping: those with host blocks are not those swapped or being copied")
        for copies in (copies for plan in plans for copies in plan.swap_out):
            if self._pool.table(copies.seq_id)[: len(copies.device_blocks)] != copies.device_blocks:
                raise InvariantError(f"swapping: sequence {copies.seq_id} is copied from blocks that it does not hold")
        for copies in (copies for plan in plans for copies in plan.swap_in):
            if not set(copies.device_blocks) <= set(self._pool.table(copies.seq_id)):
                raise InvariantError(f"swapping: sequence {copies.seq_id} is copied to blocks that it does not hold")
        for seq in self._table.members(SequenceStatus.SWAPPED).values():
            if len(self._host.table(seq.seq_id)) != self._pool.blocks_for(seq.num_computed_tokens):
                raise InvariantError(f"swapping: sequence {seq.seq_id} is not on the host as far as it is computed")
