"""Fills sampled tokens into steps that were scheduled before those tokens were known. Pure; decides nothing.

The thread that computes the steps owns one: call `fill` before each step and `note` after it, in step order.
"""

from array import array
from dataclasses import replace

from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult


class TokensInFlight:
    """The last sampled token of each sequence that is not finished."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def fill(self, batch: StepBatch) -> StepBatch:
        """Replace placeholders by the sampled ids. After a failure the id is arbitrary: the result is dropped."""
        for seq_id in batch.finished:
            self._last.pop(seq_id, None)
        if not any(part.is_placeholder for part in batch.scheduled):
            return batch
        return replace(batch, scheduled=tuple(map(self._filled, batch.scheduled)))

    def note(self, result: StepResult) -> None:
        """Remember the tokens that a step sampled."""
        self._last.update(result.sampled)

    def _filled(self, part: ScheduledSequence) -> ScheduledSequence:
        if not part.is_placeholder:
            return part
        return replace(part, token_ids=array("I", (self._last.get(part.seq_id, 0),)), is_placeholder=False)
