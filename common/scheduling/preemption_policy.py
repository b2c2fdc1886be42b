"""Who gives its blocks back when decoding sequences need more than there are. One pure choice, no state.

Blocks for the next token of all that decode: who grows, who goes to the host or is given back, who returns. Pure.

Best first, by class and age. When no block is left the worst goes to the host, or is given back if there is no room
there either. What is swapped out returns when there is room for it and for all that decode to grow: nothing new starts
meanwhile (`admission.py`), and what cannot return for `swap_wait_s` is given back. The best of all never waits for
worse ones: should it be swapped out, it takes their blocks.

A step is planned ahead of one in flight only while nobody lacks a block: what has to give its own is in no step then.
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
    """Best first: class, then age. Fixed over a sequence's life, so that the best one stays the best till it ends."""
    return seq.spec.priority, seq.spec.accepted_at, seq.seq_id


def best_of(*groups: Iterable[Sequence]) -> Sequence | None:
    """The oldest of the best class; None when there is nobody."""
    return min((seq for group in groups for seq in group), key=rank, default=None)


def choose_victim(decoding: Iterable[Sequence], safe: Sequence | None, max_preemptions: int) -> Sequence | None:
    """The youngest of the lowest class; None when nobody may be taken.

    Never `safe`, the best of all that decode or are swapped out: it finishes, whatever happens to the others. Never one
    that was given back max_preemptions times: it got its blocks to the end at once. Nor one whose blocks a step or a
    transport still touches.
    """
    eligible = [
        seq
        for seq in decoding
        if seq is not safe and seq.spec.times_preempted < max_preemptions and not seq.steps_in_flight and not seq.pins
    ]
    return max(eligible, key=rank, default=None)


class PreemptionPolicy:
    """Called once for each step that is planned, before anybody gets a token of it."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, table: SequenceTable, swapping: Swapping) -> None:
        self._config = config
        self._pool = pool
        self._table = table
        self._swapping = swapping
        self._watermark_blocks = ceil(config.watermark_blocks_share * pool.num_total)
        self._num_promised = 0
        """Blocks, of those free and coming, that better ones wait for in this step."""
        self.num_preemptions = 0
        """Sequences given back, total since start."""

    def make(self, batch: StepBuilder, now: float, events: list[SchedulerEvent]) -> None:
        """Give blocks, and take them from the worst where it must be; copies go into the batch."""
        self._num_promised = 0
        if not self._table.count(SequenceStatus.SWAPPED) and not self._needy(None):
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
        for seq in self._needy(best):
            while not self._serve(seq, batch):
                victim = choose_victim(self._members(SequenceStatus.DECODING), best, self._config.max_preemptions)
                if victim is None:
                    break  # it skips this step; whoever holds the blocks ends some time, or is revoked
                if not self._swapping.swap_out(victim, batch, now):
                    self._preempt(victim, events)
        self._let_return(batch)

    def make_ahead(self) -> bool:
        """While a step is in flight: a place for the next token of all that decode, also behind one that is being
        drawn. False, and nothing changed: not for all, or somebody is swapped out. Then the step comes back first."""
        if self._table.count(*SWAPPED_OUT):
            return False
        decoding = self._members(SequenceStatus.DECODING)
        lacking = [s for s in decoding if (s.num_unscheduled_tokens > 0 or s.may_go_ahead) and not self.has_room(s)]
        if len(lacking) > self._pool.num_free:
            return False
        return all(self._pool.grow(seq.seq_id, seq.num_scheduled_tokens + 1) for seq in lacking)

    def has_room(self, seq: Sequence) -> bool:
        """Whether its blocks have a place for the next token that it computes."""
        return len(self._pool.table(seq.seq_id)) * self._pool.block_size > seq.num_scheduled_tokens

    def can_run(self, seq: Sequence) -> bool:
        """Whether a decoding sequence has a place for its next token, or there is a block to make one."""
        return self.has_room(seq) or self._pool.num_free > 0

    def _needy(self, best: Sequence | None) -> list[Sequence]:
        """Those that decode and have no place for their next token, and the best of all if it is swapped out."""
        needy = [
            s for s in self._members(SequenceStatus.DECODING) if s.num_unscheduled_tokens > 0 and not self.has_room(s)
        ]
        if best is not None and best.status is SequenceStatus.SWAPPED:
            needy.append(best)
        return sorted(needy, key=rank)

    def _serve(self, seq: Sequence, batch: StepBuilder) -> bool:
        """Whether it has its blocks now, or waits for some that come when copies in flight are done; or is taken from
        itself."""
        coming, free = self._swapping.num_coming_blocks, self._pool.num_free
        promised = max(0, self._num_promised - coming)
        if seq.status is SequenceStatus.SWAPPED:
            if self._swapping.swap_in(seq, batch, keep_free=promised):
                return True
            wanted = self._swapping.num_wanted(seq)
        elif seq.status is SequenceStatus.DECODING:
            if free > promised and self._pool.grow(seq.seq_id, seq.num_scheduled_tokens + 1):
                return True
            wanted = 1
        else:
            return True
        if wanted > free + coming - self._num_promised:
            return False
        self._num_promised += wanted
        return True

    def _let_return(self, batch: StepBuilder) -> None:
        """Best first; the first that has no room stops the rest: what is behind it must not take its blocks."""
        for seq in sorted(self._members(SequenceStatus.SWAPPED), key=rank):
            num_decoding = self._table.count(SequenceStatus.DECODING)
            keep_free = self._watermark_blocks + num_decoding + 1 if num_decoding else 0
            if not self._swapping.swap_in(seq, batch, keep_free):
                break

    def _preempt(self, seq: Sequence, events: list[SchedulerEvent]) -> None:
        self.num_preemptions += 1
        self._table.end(seq)
        events.append(Preempted(seq.seq_id))

    def _members(self, status: SequenceStatus) -> list[Sequence]:
        return list(self._table.members(status).values())
