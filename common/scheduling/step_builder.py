"""Builds one StepBatch: who gets how many tokens of the budget. Plain arithmetic, no choice of who."""

from array import array

from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.scheduling.sequence import Sequence, SequenceStatus
from kvferry.common.scheduling.step import BlockCopies, NewSequence, ScheduledSequence, StepBatch


class StepBuilder:
    """A step in the making. Give tokens with `give`, add copies, then `seal` once."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        """What is left."""
        self.swap_out: list[BlockCopies] = []
        self.swap_in: list[BlockCopies] = []
        self._shares: dict[int, int] = {}
        self._sequences: dict[int, Sequence] = {}

    def give(self, seq: Sequence, max_tokens: int) -> None:
        """Compute up to max_tokens more of it, within the budget and what it has."""
        self._give(seq, min(max_tokens, seq.num_unscheduled_tokens - self._shares.get(seq.seq_id, 0)))

    def give_ahead(self, seq: Sequence) -> None:
        """Compute the token that a step in flight draws for it, within the budget."""
        self._give(seq, 1)

    def _give(self, seq: Sequence, num_tokens: int) -> None:
        count = min(num_tokens, self.budget_tokens)
        if count > 0:
            self._shares[seq.seq_id] = self._shares.get(seq.seq_id, 0) + count
            self._sequences[seq.seq_id] = seq
            self.budget_tokens -= count

    @property
    def is_empty(self) -> bool:
        """Whether nobody got a token, and nothing is copied."""
        return not (self._shares or self.swap_out or self.swap_in)

    def seal(self, step_id: int, pool: BlockPool, finished: tuple[int, ...]) -> StepBatch:
        """The plan. The sequences count as scheduled, and as announced, from here on."""
        new = tuple(_announce(seq) for seq in self._sequences.values() if not seq.announced)
        report_layers = any(_is_ferried(seq) for seq in self._sequences.values())
        scheduled = tuple(_schedule(seq, self._shares[seq_id], pool) for seq_id, seq in self._sequences.items())
        return StepBatch(step_id, scheduled, new, finished, report_layers, tuple(self.swap_out), tuple(self.swap_in))


def _announce(seq: Sequence) -> NewSequence:
    seq.announced = True
    return NewSequence(seq.seq_id, array("I", seq.token_ids), seq.spec.sampling)


def _is_ferried(seq: Sequence) -> bool:
    """Whether KV of this step may be on its way to another node: not when one more token ends the request."""
    more_than_one = seq.spec.sampling.max_new_tokens - seq.num_outputs > 1
    return seq.spec.mode == "prefill" and seq.status is not SequenceStatus.DECODING and more_than_one


def _schedule(seq: Sequence, count: int, pool: BlockPool) -> ScheduledSequence:
    start, end = seq.num_scheduled_tokens, seq.num_scheduled_tokens + count
    ahead = end > len(seq.token_ids)
    sample = ahead or end == len(seq.token_ids)
    seq.num_scheduled_tokens = end
    seq.steps_in_flight += 1
    seq.num_undrawn += sample
    return ScheduledSequence(
        seq_id=seq.seq_id,
        token_ids=array("I", (0,)) if ahead else seq.token_ids[start:end],
        start_position=start,
        block_table=pool.table(seq.seq_id)[: pool.blocks_for(end)],
        sample=sample,
        seed_position=end if sample else -1,
        after_draw=ahead,
    )
