"""Applies a step's result to its sequences. Pure; changes sequences via their table.

Results for an ended sequence are dropped: it was aborted, or the step was scheduled ahead of the token that ended it.
Its blocks are held until the last step that names it is back.
"""

from kvferry.common.base.errors import InvariantError
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.protocol.messages import FinishReason
from kvferry.common.scheduling.events import ChunkComputed, Failed, Finished, Prefilled, Sampled, SchedulerEvent
from kvferry.common.scheduling.sequence import SchedulerConfig, Sequence, SequenceStatus
from kvferry.common.scheduling.sequence_table import SequenceTable
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult
from kvferry.common.scheduling.swapping import Swapping


class Results:
    """Call `apply` for each step, in order."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, table: SequenceTable, swapping: Swapping) -> None:
        self._config = config
        self._pool = pool
        self._table = table
        self._swapping = swapping

    def apply(self, batch: StepBatch, result: StepResult) -> list[SchedulerEvent]:
        self._swapping.apply(batch)
        events: list[SchedulerEvent] = []
        for part in batch.scheduled:
            seq = self._table.get(part.seq_id)
            seq.steps_in_flight -= 1
            seq.tokens_in_flight -= part.sample
            why = result.failed.get(part.seq_id)
            if why is not None:
                self._fail(seq, why, events)
            else:
                self._advance(seq, part, result.sampled.get(part.seq_id), events)
        return events

    def accept_token(self, seq: Sequence, events: list[SchedulerEvent]) -> bool:
        """Emit the last id as a new output token, and end the sequence if that token ends it. Whether it continues."""
        return self._emit_token(seq, seq.finish_reason(self._config.eos_token_ids), events)

    def _emit_token(self, seq: Sequence, reason: FinishReason | None, events: list[SchedulerEvent]) -> bool:
        events.append(Sampled(seq.seq_id, seq.token_ids[-1], len(seq.token_ids) - 1, seq.num_outputs - 1))
        if reason is None:
            return True
        self._table.end(seq)
        events.append(Finished(seq.seq_id, reason))
        return False

    def _fail(self, seq: Sequence, why: str, events: list[SchedulerEvent]) -> None:
        seq.is_valid = False
        self._pool.invalidate(seq.seq_id)
        if not seq.steps_in_flight:
            seq.num_scheduled_tokens = seq.num_computed_tokens
        if seq.status is SequenceStatus.ENDED:
            self._table.settle(seq)
            return
        self._table.end(seq)
        events.append(Failed(seq.seq_id, why))

    def _advance(self, seq: Sequence, part: ScheduledSequence, token: int | None, events: list[SchedulerEvent]) -> None:
        # A step scheduled ahead also computed the dropped token of a sequence that ended before that token came.
        start, end = part.start_position, min(part.start_position + len(part.token_ids), len(seq.token_ids))
        seq.num_computed_tokens = end
        if seq.is_valid and end // self._pool.block_size > start // self._pool.block_size:
            self._pool.publish(seq.seq_id, seq.token_ids, end)
        if seq.status is SequenceStatus.ENDED:
            if not seq.steps_in_flight:
                seq.num_scheduled_tokens = end
            self._table.settle(seq)
            return
        reason = None
        if token is not None:
            seq.token_ids.append(token)
            reason = seq.finish_reason(self._config.eos_token_ids)
        in_prompt = seq.status is not SequenceStatus.DECODING
        if in_prompt and reason is None:
            events.append(ChunkComputed(seq.seq_id, start, end))
        if token is not None and self._emit_token(seq, reason, events) and in_prompt:
            self._leave_prompt(seq, events)

    def _leave_prompt(self, seq: Sequence, events: list[SchedulerEvent]) -> None:
        """All its known ids are computed, and the next one was sampled."""
        if seq.spec.mode == "prefill":
            self._table.move(seq, SequenceStatus.PREFILLED)
            events.append(prefilled(seq))
        else:
            self._table.move(seq, SequenceStatus.DECODING)


def prefilled(seq: Sequence) -> SchedulerEvent:
    """The event for a sequence that became PREFILLED."""
    return Prefilled(seq.seq_id, seq.num_computed_tokens, seq.token_ids[-1], seq.num_outputs - 1)


def check_result(batch: StepBatch, result: StepResult) -> None:
    """Raise InvariantError when a token is missing, or the result has a sequence that the batch does not."""
    failed, sampled = result.failed.keys(), result.sampled.keys()
    expected = {part.seq_id for part in batch.scheduled if part.sample}
    if not expected - failed <= sampled <= expected or not failed <= {part.seq_id for part in batch.scheduled}:
        raise InvariantError(f"result of step {result.step_id}: its sequences are not those of the batch")
