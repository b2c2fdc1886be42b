"""What was drawn goes into steps that were planned before it was known."""

from array import array

from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult
from kvferry.common.scheduling.tokens_in_flight import TokensInFlight


def part(seq_id: int, token_id: int = 0, *, ahead: bool = False) -> ScheduledSequence:
    return ScheduledSequence(seq_id, array("I", [token_id]), 4, (0, 1), True, 5, after_draw=ahead)


def test_the_id_is_what_was_drawn_last_for_this_sequence():
    drawn = TokensInFlight()
    drawn.note(StepResult(1, {7: 11, 8: 12}))
    drawn.note(StepResult(2, {7: 13}))
    plan = StepBatch(3, (part(7, ahead=True), part(9, 5), part(8, ahead=True)))
    assert drawn.fill(plan) == StepBatch(3, (part(7, 13), part(9, 5), part(8, 12)))


def test_a_plan_with_nothing_ahead_is_left_as_it_is():
    plan = StepBatch(3, (part(7, 13),))
    assert TokensInFlight().fill(plan) is plan


def test_for_one_that_failed_it_is_some_id():
    [filled] = TokensInFlight().fill(StepBatch(3, (part(7, ahead=True),))).scheduled
    assert filled == part(7, 0)


def test_what_has_ended_is_forgotten():
    drawn = TokensInFlight()
    drawn.note(StepResult(1, {7: 11}))
    plan = StepBatch(2, (part(7, ahead=True),), finished=(7,))
    assert drawn.fill(plan).scheduled == (part(7, 0),)
