"""The last token drawn of each sequence, for steps that are planned before it is known. Decides nothing.

Whoever computes keeps one: `fill` before each step, `note` after it. Steps come one after the other.
"""

from array import array
from dataclasses import replace

from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult


class TokensInFlight:
    """Of all sequences that the plans have not named as finished."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def fill(self, plan: StepBatch) -> StepBatch:
        """The plan with true ids. For a sequence of which nothing could be drawn it is any id: what the step brings
        for that one is dropped."""
        for seq_id in plan.finished:
            self._last.pop(seq_id, None)
        if not any(part.after_draw for part in plan.scheduled):
            return plan
        return replace(plan, scheduled=tuple(map(self._filled, plan.scheduled)))

    def note(self, result: StepResult) -> None:
        """What a step drew."""
        self._last.update(result.sampled)

    def _filled(self, part: ScheduledSequence) -> ScheduledSequence:
        if not part.after_draw:
            return part
        return replace(part, token_ids=array("I", (self._last.get(part.seq_id, 0),)), after_draw=False)
