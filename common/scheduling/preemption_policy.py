"""Allocates blocks for the next tokens of decoding sequences; decides who is swapped out or in, or preempted. Pure.

Sequences are served by rank (class, then age). When no block is left, the lowest-ranking one is swapped out, or
preempted if the host is full too. A swapped-out sequence returns when there are blocks for it and for the growth of
all decoding ones. No new sequence starts meanwhile (`admission`), and one that cannot return for `swap_wait_s` is
preempted. The highest-ranking sequence never waits for lower ones: if it is swapped out, it takes their blocks.

A step is scheduled ahead of one in flight only while every sequence has its block. So a victim is never in a step.
"""

from collections.abc import Iterable
from math import ceil

from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.scheduling.admission import SWAPPED_OUT
from kvferry.common.scheduling.events import Preempted, SchedulerEvent
from kvferry.common.scheduling.sequence import SchedulerConfig, Sequence, SequenceStatus
from kvferry.common.scheduling.sequence_table import SequenceTable
from kvferry.common.scheduling.step_builder import StepBuilder
from kvferry.common.scheduling.swapping import Swapping


def rank(seq: Sequence) -> tuple[int, float, int]:
    """Smaller is better: class, then age. Constant for a sequence, so the best one stays the best until it ends."""
    return seq.spec.priority, seq.spec.accepted_at, seq.seq_id


def best_of(*groups: Iterable[Sequence]) -> Sequence | None:
    """The sequence of the best rank; None when there is none."""
    return min((seq for group in groups for seq in group), key=rank, default=None)


def choose_victim(decoding: Iterable[Sequence], safe: Sequence | None, max_preemptions: int) -> Sequence | None:
    """The eligible sequence of the worst rank; None when none is eligible.

    Not eligible: `safe`, the best of all decoding or swapped-out sequences, which so always finishes; one that was
    preempted max_preemptions times, which has blocks for its full length; one whose blocks a step or transport still
    uses.
    """
    eligible = [
        seq
        for seq in decoding
        if seq is not safe and seq.spec.times_preempted < max_preemptions and not seq.steps_in_flight and not seq.pins
    ]
    return max(eligible, key=rank, default=None)


class PreemptionPolicy:
    """Call `allocate` (or `allocate_ahead`) once per step, before sequences are added to it."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, table: SequenceTable, swapping: Swapping) -> None:
        self._config = config
        self._pool = pool
        self._table = table
        self._swapping = swapping
        self._watermark_blocks = ceil(config.watermark_blocks_share * pool.num_total)
        self._num_promised = 0
        """Free or pending blocks that better sequences wait for in this step."""
        self.num_preemptions = 0
        """Number of preemptions since start."""

    def allocate(self, builder: StepBuilder, now: float, events: list[SchedulerEvent]) -> None:
        """Allocate blocks for the next tokens, if necessary by swapping out or preempting; adds the copies to the
        step."""
        self._num_promised = 0
        if not self._table.count(SequenceStatus.SWAPPED) and not self._lacking_blocks(None):
            return
        best = best_of(
            *(
                self._members(status)
                for status in (SequenceStatus.DECODING, SequenceStatus.SWAPPING, SequenceStatus.SWAPPED)
            )
        )
        for seq in self._members(SequenceStatus.SWAPPED):
            if seq is not best and now - seq.swapped_at > self._config.swap_wait_s:
                self._preempt(seq, events)
        for seq in self._lacking_blocks(best):
            while not self._provide_blocks(seq, builder):
                victim = choose_victim(self._members(SequenceStatus.DECODING), best, self._config.max_preemptions)
                if victim is None:
                    break  # It skips this step. The holders of the blocks end eventually, or are revoked.
                if not self._swapping.swap_out(victim, builder, now):
                    self._preempt(victim, events)
        self._swap_in(builder)

    def allocate_ahead(self) -> bool:
        """While a step is in flight, allocate blocks for the next token of all decoding sequences, also after a token
        in flight. False, with nothing changed: too few free blocks, or a sequence is swapped out."""
        if self._table.count(*SWAPPED_OUT):
            return False
        decoding = self._members(SequenceStatus.DECODING)
        lacking = [
            s for s in decoding if (s.num_unscheduled_tokens > 0 or s.may_schedule_ahead) and not self.has_next_block(s)
        ]
        if len(lacking) > self._pool.num_free:
            return False
        return all(self._pool.grow(seq.seq_id, seq.num_scheduled_tokens + 1) for seq in lacking)

    def has_next_block(self, seq: Sequence) -> bool:
        """Whether its blocks cover the next token that it computes."""
        return len(self._pool.table(seq.seq_id)) * self._pool.block_size > seq.num_scheduled_tokens

    def can_run(self, seq: Sequence) -> bool:
        """Whether a decoding sequence has a block for its next token, or one is free."""
        return self.has_next_block(seq) or self._pool.num_free > 0

    def _lacking_blocks(self, best: Sequence | None) -> list[Sequence]:
        """Decoding sequences without a block for their next token, and `best` if it is swapped out; best first."""
        lacking = [
            s
            for s in self._members(SequenceStatus.DECODING)
            if s.num_unscheduled_tokens > 0 and not self.has_next_block(s)
        ]
        if best is not None and best.status is SequenceStatus.SWAPPED:
            lacking.append(best)
        return sorted(lacking, key=rank)

    def _provide_blocks(self, seq: Sequence, builder: StepBuilder) -> bool:
        """False: a victim is needed. True: it has its blocks, is promised some that swap-outs in flight will free, or
        was itself the victim."""
        pending, free = self._swapping.num_pending_blocks, self._pool.num_free
        promised = max(0, self._num_promised - pending)
        if seq.status is SequenceStatus.SWAPPED:
            if self._swapping.swap_in(seq, builder, keep_free=promised):
                return True
            needed = self._swapping.num_needed(seq)
        elif seq.status is SequenceStatus.DECODING:
            if free > promised and self._pool.grow(seq.seq_id, seq.num_scheduled_tokens + 1):
                return True
            needed = 1
        else:
            return True
        if needed > free + pending - self._num_promised:
            return False
        self._num_promised += needed
        return True

    def _swap_in(self, builder: StepBuilder) -> None:
        """Swap sequences in, best first. The first refused one ends it: later ones must not take its blocks."""
        for seq in sorted(self._members(SequenceStatus.SWAPPED), key=rank):
            num_decoding = self._table.count(SequenceStatus.DECODING)
            keep_free = self._watermark_blocks + num_decoding + 1 if num_decoding else 0
            if not self._swapping.swap_in(seq, builder, keep_free):
                break

    def _preempt(self, seq: Sequence, events: list[SchedulerEvent]) -> None:
        self.num_preemptions += 1
        self._table.end(seq)
        events.append(Preempted(seq.seq_id))

    def _members(self, status: SequenceStatus) -> list[Sequence]:
        return list(self._table.members(status).values())
