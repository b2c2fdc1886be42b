"""Sampled tokens are filled into steps that were scheduled before they were known."""

from array import array

from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult
from kvferry.common.scheduling.tokens_in_flight import TokensInFlight


def part(seq_id: int, token_id: int = 0, *, ahead: bool = False) -> ScheduledSequence:
    return ScheduledSequence(seq_id, array("I", [token_id]), 4, (0, 1), True, 5, is_placeholder=ahead)


def test_a_placeholder_becomes_the_last_sampled_id_of_its_sequence():
    tokens = TokensInFlight()
    tokens.note(StepResult(1, {7: 11, 8: 12}))
    tokens.note(StepResult(2, {7: 13}))
    batch = StepBatch(3, (part(7, ahead=True), part(9, 5), part(8, ahead=True)))
    assert tokens.fill(batch) == StepBatch(3, (part(7, 13), part(9, 5), part(8, 12)))


def test_a_batch_without_placeholders_is_returned_unchanged():
    batch = StepBatch(3, (part(7, 13),))
    assert TokensInFlight().fill(batch) is batch


def test_a_failed_sequence_gets_any_id():
    [filled] = TokensInFlight().fill(StepBatch(3, (part(7, ahead=True),))).scheduled
    assert filled == part(7, 0)


def test_finished_sequences_are_forgotten():
    tokens = TokensInFlight()
    tokens.note(StepResult(1, {7: 11}))
    batch = StepBatch(2, (part(7, ahead=True),), finished=(7,))
    assert tokens.fill(batch).scheduled == (part(7, 0),)
