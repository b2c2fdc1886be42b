"""What a step's result does to the sequences in it. Changes sequences through their table only.

What comes for a sequence that has ended is dropped: it was aborted, or the step was planned ahead of the token that
ended it. Its blocks stay until the last step that names it is back.
"""

from kvferry.common.base.errors import InvariantError
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.scheduling.events import (
    ChunkComputed,
    Failed,
    Finished,
    FinishReason,
    Prefilled,
    Sampled,
    SchedulerEvent,
)
from kvferry.common.scheduling.sequence import SchedulerConfig, Sequence, SequenceStatus
from kvferry.common.scheduling.sequence_table import SequenceTable
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult
from kvferry.common.scheduling.swapping import Swapping


class Results:
    """Takes results in, in the order of the steps."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, table: SequenceTable, swapping: Swapping) -> None:
        self._config = config
        self._pool = pool
        self._table = table
        self._swapping = swapping

    def apply(self, plan: StepBatch, result: StepResult) -> list[SchedulerEvent]:
        """The result of a step that has just left the flight."""
        self._swapping.apply(plan)
        events: list[SchedulerEvent] = []
        for part in plan.scheduled:
            seq = self._table.get(part.seq_id)
            seq.steps_in_flight -= 1
            seq.num_undrawn -= part.sample
            why = result.failed.get(part.seq_id)
            if why is not None:
                self._fail(seq, why, events)
            else:
                self._advance(seq, part, result.sampled.get(part.seq_id), events)
        return events

    def accept_token(self, seq: Sequence, events: list[SchedulerEvent]) -> bool:
        """Its last id is a new output token: tell it, and end the sequence if that is the end. Whether it goes on."""
        return self._tell_token(seq, seq.finish_reason(self._config.eos_token_ids), events)

    def _tell_token(self, seq: Sequence, reason: FinishReason | None, events: list[SchedulerEvent]) -> bool:
        events.append(Sampled(seq.seq_id, seq.token_ids[-1], len(seq.token_ids) - 1, seq.num_outputs - 1))
        if reason is None:
            return True
        self._table.end(seq)
        events.append(Finished(seq.seq_id, reason))
        return False

    def _fail(self, seq: Sequence, why: str, events: list[SchedulerEvent]) -> None:
        seq.trusted = False
        self._pool.distrust(seq.seq_id)
        if not seq.steps_in_flight:
            seq.num_scheduled_tokens = seq.num_computed_tokens
        if seq.status is SequenceStatus.ENDED:
            self._table.settle(seq)
            return
        self._table.end(seq)
        events.append(Failed(seq.seq_id, why))

    def _advance(self, seq: Sequence, part: ScheduledSequence, token: int | None, events: list[SchedulerEvent]) -> None:
        # Of one that ended before its token came, a step planned ahead computed a position whose id nobody keeps.
        start, end = part.start_position, min(part.start_position + len(part.token_ids), len(seq.token_ids))
        seq.num_computed_tokens = end
        if seq.trusted and end // self._pool.block_size > start // self._pool.block_size:
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
        if token is not None and self._tell_token(seq, reason, events) and in_prompt:
            self._leave_prompt(seq, events)

    def _leave_prompt(self, seq: Sequence, events: list[SchedulerEvent]) -> None:
        """Its known ids are computed, and the next one is drawn."""
        if seq.spec.mode == "prefill":
            self._table.move(seq, SequenceStatus.PREFILLED)
            events.append(prefilled(seq))
        else:
            self._table.move(seq, SequenceStatus.DECODING)


def prefilled(seq: Sequence) -> SchedulerEvent:
    """The event of a sequence that has just become PREFILLED."""
    return Prefilled(seq.seq_id, seq.num_computed_tokens, seq.token_ids[-1], seq.num_outputs - 1)


def check_result(plan: StepBatch, result: StepResult) -> None:
    """InvariantError when a token is missing, or the result names a sequence that the plan does not."""
    failed, sampled = result.failed.keys(), result.sampled.keys()
    drawn = {part.seq_id for part in plan.scheduled if part.sample}
    if not drawn - failed <= sampled <= drawn or not failed <= {part.seq_id for part in plan.scheduled}:
        raise InvariantError(f"result of step {result.step_id}: its sequences do not fit the plan")
