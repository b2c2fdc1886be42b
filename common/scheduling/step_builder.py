"""Builds one StepBatch within a token budget. Plain arithmetic: the caller chooses the sequences."""

from array import array

from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.scheduling.sequence import Sequence, SequenceStatus
from kvferry.common.scheduling.step import BlockCopies, NewSequence, ScheduledSequence, StepBatch


class StepBuilder:
    """Collects a step: call `add` and `add_ahead`, append copies, then call `build` once."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        """The remaining budget."""
        self.swap_out: list[BlockCopies] = []
        self.swap_in: list[BlockCopies] = []
        self._num_tokens: dict[int, int] = {}
        self._sequences: dict[int, Sequence] = {}

    def add(self, seq: Sequence, max_tokens: int) -> None:
        """Compute up to max_tokens more of its unscheduled tokens, within the budget."""
        self._add(seq, min(max_tokens, seq.num_unscheduled_tokens - self._num_tokens.get(seq.seq_id, 0)))

    def add_ahead(self, seq: Sequence) -> None:
        """Compute its token in flight, within the budget."""
        self._add(seq, 1)

    def _add(self, seq: Sequence, num_tokens: int) -> None:
        count = min(num_tokens, self.budget_tokens)
        if count > 0:
            self._num_tokens[seq.seq_id] = self._num_tokens.get(seq.seq_id, 0) + count
            self._sequences[seq.seq_id] = seq
            self.budget_tokens -= count

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed or copied."""
        return not (self._num_tokens or self.swap_out or self.swap_in)

    def build(self, step_id: int, pool: BlockPool, finished: tuple[int, ...]) -> StepBatch:
        """Return the batch and mark its sequences as scheduled and announced."""
        new = tuple(_announce(seq) for seq in self._sequences.values() if not seq.announced)
        report_layers = any(_may_be_transferred(seq) for seq in self._sequences.values())
        scheduled = tuple(_schedule(seq, self._num_tokens[seq_id], pool) for seq_id, seq in self._sequences.items())
        return StepBatch(step_id, scheduled, new, finished, report_layers, tuple(self.swap_out), tuple(self.swap_in))


def _announce(seq: Sequence) -> NewSequence:
    seq.announced = True
    return NewSequence(seq.seq_id, array("I", seq.token_ids), seq.spec.sampling)


def _may_be_transferred(seq: Sequence) -> bool:
    """Whether KV of this step may be sent to another node: not when one more token ends the request."""
    more_than_one = seq.spec.sampling.max_new_tokens - seq.num_outputs > 1
    return seq.spec.mode == "prefill" and seq.status is not SequenceStatus.DECODING and more_than_one


def _schedule(seq: Sequence, count: int, pool: BlockPool) -> ScheduledSequence:
    start, end = seq.num_scheduled_tokens, seq.num_scheduled_tokens + count
    ahead = end > len(seq.token_ids)
    sample = ahead or end == len(seq.token_ids)
    seq.num_scheduled_tokens = end
    seq.steps_in_flight += 1
    seq.tokens_in_flight += sample
    return ScheduledSequence(
        seq_id=seq.seq_id,
        token_ids=array("I", (0,)) if ahead else seq.token_ids[start:end],
        start_position=start,
        block_table=pool.table(seq.seq_id)[: pool.blocks_for(end)],
        sample=sample,
        seed_position=end if sample else -1,
        is_placeholder=ahead,
    )
